// A step of the Reducer, up to its last launch; see Note [A step] in the header. Its end: reducer_finish.cpp. Set-up and modes:
// reducer_modes.cpp.
#include "reducer/reducer.h"

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>

#include "common/check.h"
#include "reducer/backward_watch.h"
#include "reducer/bucket_range.h"
#include "reducer/messages.h"
#include "reducer/reducer_inl.h"
#include "transport/c10d/group_work.h"

namespace torchddp::reducer {

using bucket::BucketState;
using timeline::EventKind;

template <typename Body>
void Reducer::guarded(Body&& body) {
  try {
    body();
  } catch (const TransportError& error) {
    const TransportError noted(live_->with_note(error.what()));
    live_->set_error(noted.what());
    abandon_step();
    throw_across_autograd(noted);
  } catch (const NonFiniteError& error) {
    live_->set_error(error.what());
    throw_across_autograd(error);
  } catch (const GraphError& error) {
    live_->set_error(error.what());
    throw;
  } catch (const std::exception& error) {
    live_->set_error(error.what());
    abandon_step();
    throw;
  }
}

bool Reducer::begin_forward() {
  if (is_unfinished()) {
    raise_unfinished();
  }
  try {
    transport_->check();
  } catch (const TransportError& error) {
    throw TransportError(live_->with_note(
        c10::str("before step ", stats_.steps + 1, ": ", error.what(),
                 ". What the last step wrote to gradients, and to weights, may be wrong on any rank")));
  }
  ++stats_.steps;
  live_->begin_forward(stats_.steps);
  forward_work_.reset();  // of a step that failed
  stats_.current = StepTimes{};
  stats_.current.forward_begin_ns = wall_clock_ns();
  note_capture();
  if (ready_clock_ != nullptr) {
    ready_clock_->begin_forward();
  }
  timeline_.record(EventKind::kForwardBegin, stats_.steps);
  return armed_.load(std::memory_order_relaxed) && !begun_.load(std::memory_order_relaxed);
}

void Reducer::clear_step() {
  if (needs_fresh_memory_) {
    apply_plan(plan_);
  }
  for (auto& bucket : buckets_) {
    bucket->begin_step();
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    marked_[i].store(kNotMarked, std::memory_order_relaxed);
  }
  next_launch_ = next_let_go_ = 0;
  num_buckets_ready_ = 0;
  live_->num_ready.store(0, std::memory_order_relaxed);
  late_.clear();
  bad_averages_.clear();
  // What abandon_step leaves.
  if (owned_) {
    kept_.assign(kept_.size(), at::Tensor());
  }
  rpc_context_.reset();
  if (static_graph_.recording()) {
    static_graph_.restart_recording();
  }
  begun_.store(false, std::memory_order_relaxed);
  incomplete_.store(false, std::memory_order_relaxed);
}

void Reducer::arm() {
  armed_.store(true, std::memory_order_release);
  transport_->begin_backward();
}

void Reducer::prepare_for_backward(std::span<const at::Tensor> outputs) {
  clear_step();
  if (static_graph_.enabled()) {
    static_graph_.begin_step();
  }
  if (dynamic_find_unused()) {
    RECORD_FUNCTION("torch.distributed.ddp.reducer::search_unused_parameters", std::vector<c10::IValue>());
    unused_ = search_->find(outputs);
    if (graph_static_ && previous_unused_) {
      graph_static_ = *previous_unused_ == unused_;
    }
    previous_unused_ = unused_;
    if (unused_.empty()) {
      TORCH_WARN_ONCE(
          "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in the "
          "forward "
          "pass. The search of the autograd graph costs time in every step: turn the flag off if the model never has "
          "unused "
          "parameters. (A false positive if control flow leaves parameters unused in later steps.)");
    }
  }
  arm();
}

void Reducer::on_grad_ready(int64_t param, const at::Tensor* incoming) {
  if (used_map_ != nullptr && !static_graph_.replaying()) [[unlikely]] {
    // Also under no_sync: a parameter that any microbatch used counts as used in the step that synchronises.
    with_grad(param, [&](at::Tensor& grad) {
      if (grad.defined()) {
        used_map_->mark(param);
      }
    });
  }
  if (!armed_.load(std::memory_order_acquire)) {
    return;
  }
  guarded([&] {
    fire(param, incoming);
    transport_->progress();
  });
}

void Reducer::fire(int64_t param, const at::Tensor* incoming) {
  if (!begun_.load(std::memory_order_acquire)) [[unlikely]] {
    begin_backward();
  }
  if (static_graph_.enabled()) {
    if (incoming == nullptr && !static_graph_.expects(param)) {
      // Of an output that the loss leaves out: torch's sink, which is there in the recorded step only, leads here.
      bool lacking = false;
      with_grad(param, [&](at::Tensor& grad) { lacking = !grad.defined(); });
      if (lacking) {
        return;
      }
    }
    if (static_graph_.recording()) {
      static_graph_.count(param);
      return;
    }
    if (!static_graph_.expects(param)) {
      throw GraphError(static_graph_changed_message(transport_->rank(), param, specs_));
    }
    if (!static_graph_.fire(param)) {
      return;
    }
  }
  mark_ready(param, false, incoming);
}

void Reducer::begin_backward() {
  const std::lock_guard lock(begin_mutex_);
  if (begun_.load(std::memory_order_relaxed)) {
    return;
  }
  note_backward_begin();
  for (const auto param : unused_) {
    on_grad_coming(param);
    mark_ready(param, true, nullptr);
  }
  begun_.store(true, std::memory_order_release);
}

void Reducer::note_backward_begin() {
  watch_backward(live_);
  stats_.current.backward_begin_ns = wall_clock_ns();
  backward_begin_steady_ns_ = timeline::now_ns();
  timeline_.record_at(EventKind::kBackwardBegin, stats_.steps, backward_begin_steady_ns_);
  if (ready_clock_ != nullptr) {
    ready_clock_->begin_backward();
  }
  rpc_context_ = torch::distributed::autograd::ThreadLocalDistAutogradContext::getContextPtr();
  scale_ = gradient_scale();
}

void Reducer::mark_ready(int64_t param, bool unused, const at::Tensor* incoming) {
  const auto before =
      marked_[static_cast<size_t>(param)].exchange(unused ? kMarkedUnused : kMarked, std::memory_order_relaxed);
  if (before != kNotMarked) {
    throw GraphError(marked_twice_message(transport_->rank(), param, specs_, before == kMarkedUnused));
  }
  incomplete_.store(true, std::memory_order_relaxed);
  if (!unused) {
    ready_order_[static_cast<size_t>(live_->num_ready.fetch_add(1, std::memory_order_relaxed))] = param;
  }
  if (records_ready_times_ || timeline_.enabled()) [[unlikely]] {
    const auto now_ns = timeline::now_ns();  // read once: the clock is most of what an event costs
    ready_times_ns_[static_cast<size_t>(param)] = now_ns - backward_begin_steady_ns_;
    timeline_.record_at(EventKind::kGradReady, param, now_ns);
    if (ready_clock_ != nullptr) {
      ready_clock_->mark(static_cast<size_t>(param));
    }
  }
  pack(param, unused, incoming);
  const auto& place = places_[static_cast<size_t>(param)];
  if (place.bucket->arrive() && bucket_ready(place.bucket_index, param, incoming)) {
    all_launched();
  }
}

bool Reducer::bucket_ready(int64_t index, int64_t last, const at::Tensor* incoming) {
  const std::lock_guard lock(launch_mutex_);
  if (!armed_.load(std::memory_order_relaxed)) [[unlikely]] {
    return false;  // the step was abandoned meanwhile
  }
  auto& bucket = *buckets_[static_cast<size_t>(index)];
  if (!bucket.is_sparse() && packs_whole_buckets()) {
    pack_whole_bucket(bucket, last, incoming);
  }
  bucket.state = BucketState::kReady;
  timeline_.record(EventKind::kPacked, index);
  // In plan order on every rank, whatever the order of arrival here: collectives must match.
  const auto count = static_cast<int64_t>(buckets_.size());
  if (++num_buckets_ready_ < count && !overlap_) {
    return false;
  }
  while (next_launch_ < count && buckets_[static_cast<size_t>(next_launch_)]->state == BucketState::kReady) {
    launch(next_launch_++);
  }
  let_go_of_finished();
  return next_launch_ == count;
}

bool Reducer::can_skip(const bucket::Bucket& bucket) const {
  return config_.skip_all_reduce_unused_params &&
         std::all_of(bucket.params().begin(), bucket.params().end(), [&](int64_t param) {
           return marked_[static_cast<size_t>(param)].load(std::memory_order_relaxed) == kMarkedUnused &&
                  !(used_map_ != nullptr && used_map_->used_here(param));  // under no_sync
         });
}

void Reducer::launch(int64_t index) {
  auto& bucket = *buckets_[static_cast<size_t>(index)];
  if (can_skip(bucket)) {
    bucket.state = BucketState::kSkipped;
    return;
  }
  const BucketRange range("launch", index, bucket, specs_);
  ++stats_.current.buckets_reduced;
  stats_.current.bytes_reduced += bucket.bytes();
  if (stats_.current.comm_begin_ns == 0) {
    stats_.current.comm_begin_ns = wall_clock_ns();
  }
  timeline_.record(EventKind::kLaunched, index);
  follow_packing(bucket);
  const auto bytes = bucket.is_sparse() ? transport::bytes_of(bucket.buffer()) : bucket.bytes();
  const auto before = transport_->traffic();
  try {
    start_reduction(index);
  } catch (const TransportError& error) {
    fail(error, index);
  }
  if (comm_hook_) {
    stats_.current.hook_bytes += bytes;
  } else {
    stats_.current.count(transport_->traffic() - before, bytes);
  }
  bucket.state = BucketState::kInFlight;
}

void Reducer::start_reduction(int64_t index) {
  auto& bucket = *buckets_[static_cast<size_t>(index)];
  auto& sparse = sparse_[static_cast<size_t>(index)];
  if (comm_hook_) {
    const WaitScope waits(*live_, "a communication hook that was called", index);
    auto grad_bucket =
        make_grad_bucket(index, static_cast<int64_t>(buckets_.size()), bucket, params_, std::nullopt, sparse.row_ids());
    bucket.future = comm_hook_.run(grad_bucket);
  } else if (bucket.is_sparse()) {
    sparse.start(bucket, *transport_);
  } else if (owned_) {
    start_reduce(index);
  } else {
    bucket.checks_in_flight = config_.raise_non_finite && sums_tell(bucket);
    transport_->all_reduce(bucket.wire(), bucket.work(), sum_options(index));
  }
}

transport::SumOptions Reducer::sum_options(int64_t index) const {
  const auto& bucket = *buckets_[static_cast<size_t>(index)];
  return {bucket.scale, transport_->narrows() ? config_.wire_dtype : std::nullopt, index,
          bucket.counts_in_flight || bucket.checks_in_flight};
}

void Reducer::all_launched() {
  if (dynamic_find_unused()) {
    const std::lock_guard lock(launch_mutex_);
    if (!armed_.load(std::memory_order_relaxed)) [[unlikely]] {
      return;  // the step was abandoned meanwhile
    }
    used_map_->start_reduction(*transport_);
  }
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this()] { self->guarded([&] { self->finalize(); }); });
}

void Reducer::delay_all_reduce() {
  if (!armed_.load(std::memory_order_acquire) || !static_graph_.recording()) {
    return;
  }
  guarded([&] {
    begin_backward();
    used_map_->start_reduction(*transport_);
    unused_.clear();
    for (int64_t param = 0; param < static_cast<int64_t>(params_.size()); ++param) {
      const bool used = static_graph_.was_used(param);
      if (!used) {
        unused_.push_back(param);
      }
      marked_[static_cast<size_t>(param)].store(used ? kMarked : kMarkedUnused, std::memory_order_relaxed);
      pack(param, !used, nullptr);
    }
    launch_all();
    static_graph_.finish_recording();
    finalize();
  });
}

void Reducer::launch_all() {
  incomplete_.store(true, std::memory_order_relaxed);
  for (size_t i = 0; i < buckets_.size(); ++i) {
    if (!buckets_[i]->is_sparse() && packs_whole_buckets()) {
      pack_whole_bucket(*buckets_[i]);
    }
    launch(static_cast<int64_t>(i));
  }
}

// What was used is what the backwards without reduction have marked: there are no outputs to search from.
void Reducer::reduce_now() {
  clear_step();
  arm();
  guarded([&] {
    note_backward_begin();
    for (int64_t index = 0; index < static_cast<int64_t>(buckets_.size()); ++index) {
      for (const auto param : buckets_[static_cast<size_t>(index)]->params()) {
        const bool unused = used_map_ != nullptr && !used_map_->used_here(param);
        on_grad_coming(param);
        marked_[static_cast<size_t>(param)].store(unused ? kMarkedUnused : kMarked, std::memory_order_relaxed);
        pack(param, unused, nullptr);
      }
      bucket_ready(index);
      transport_->progress();
    }
    if (used_map_ != nullptr && !static_graph_.replaying()) {
      used_map_->start_reduction(*transport_);
    }
    finalize();
  });
}

void Reducer::fail(const TransportError& error, int64_t index) {
  throw TransportError(transport_failure_message(transport_->rank(), stats_.steps, index,
                                                 static_cast<int64_t>(buckets_.size()),
                                                 buckets_[static_cast<size_t>(index)]->params(), specs_, error.what()));
}

// Hooks of other devices may still be running: they launch nothing after this, and what they use without a lock stays as it is until
// the next step begins (clear_step).
void Reducer::abandon_step() {
  armed_.store(false, std::memory_order_release);
  if (non_finite_ != nullptr) {
    non_finite_->publish();  // may be why
  }
  live_->abandon_step();
  transport_->end_backward();
  const std::lock_guard lock(launch_mutex_);
  incomplete_.store(false, std::memory_order_relaxed);
  for (auto& bucket : buckets_) {
    bucket->work().abandon();
    bucket->future.reset();
    bucket->state = BucketState::kIdle;
  }
  if (used_map_ != nullptr) {
    used_map_->abandon();
  }
  needs_fresh_memory_ = true;
  const std::lock_guard late_lock(late_mutex_);
  late_.clear();
  futures_.reset();
}

double Reducer::gradient_scale() {
  int64_t divisor = divisor_ ? divisor_() : transport_->size();
  TDDP_CHECK(divisor > 0, "gradients can't be averaged over ", divisor, " ranks");
  if (forward_work_ != nullptr && !forward_work_static_world_) {
    // Under join(): how many ranks still have inputs.
    const WaitScope waits(*live_, "how many ranks still have inputs (join)");
    if (transport::is_gloo(*group_)) {
      transport::wait_interruptibly(*forward_work_, group_, transport_->interruption());
    } else {
      forward_work_->wait();
    }
    const auto results = forward_work_->result();
    TDDP_INTERNAL(!results.empty(), "the all-reduce of join() has no result");
    divisor = results.front().item<int64_t>();
  }
  return comm_hook_ ? 1.0 : 1.0 / static_cast<double>(divisor);
}

}  // namespace torchddp::reducer
