#include "reducer/reducer.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include "reducer/report/messages.h"

namespace torchddp::reducer {

Reducer::Reducer(std::vector<at::Tensor> params, std::vector<plan::ParamSpec> specs,
                 c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<transport::Transport> transport,
                 ReducerConfig config)
    : parts_(std::move(params), std::move(specs), std::move(group), std::move(transport), std::move(config)) {
  parts_.keeper.lay_out_first();
  hooks_ = std::make_unique<GradHooks>(parts_.context.params, *this);
  if (parts_.context.owned || parts_.weights.listens()) hooks_->call_before();
  parts_.used.set_hooks(*hooks_);
}

template <typename Body>
void Reducer::guarded(Body&& body) {
  auto& live = parts_.events.live();
  try {
    body();
  } catch (const TransportError& error) {
    const TransportError noted(live.with_note(error.what()));
    live.set_error(noted.what());
    abandon();
    throw_across_autograd(noted);
  } catch (const StepError& error) {
    live.set_error(error.what());
    throw_across_autograd(error);
  } catch (const GraphError& error) {
    live.set_error(error.what());
    throw;
  } catch (const std::exception& error) {
    live.set_error(error.what());
    abandon();
    throw;
  }
}

bool Reducer::begin_forward() {
  check_not_unfinished();
  described(
      [&] {
        return c10::str("rank ", parts_.context.rank(), ", before step ", parts_.events.steps() + 1,
                        ": gradients and weights written by the last step may be wrong on any rank.");
      },
      [&] { parts_.context.transport->check(); }, &parts_.events.live());
  parts_.events.begin_forward();
  parts_.divisor.forget_forward_work();
  parts_.keeper.note_capture();
  return parts_.step.armed() && !parts_.step.begun();
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs, bool has_hooks) {
  begin_step();
  parts_.packed.begin_step(has_hooks);
  parts_.used.search(outputs);
  arm();
}

void Reducer::before_accumulation(int64_t param, at::Tensor& incoming) {
  parts_.own_averages.before_accumulation(param);
  guarded([&] { parts_.weights.before_accumulation(param, parts_.static_graph.enabled(), incoming); });
}

void Reducer::on_grad_ready(int64_t param, const at::Tensor* incoming) {
  if (parts_.context.main_grads != nullptr && !take_main_grad(param) && incoming != nullptr) parts_.used.mark(param);
  parts_.used.note(param, incoming);
  parts_.weights.after_accumulation(param);
  if (!parts_.step.armed()) return;
  parts_.packers.note_stream(param);
  guarded([&] {
    const auto begin = [&] {
      begin_backward();
      auto& engine = torch::autograd::Engine::get_default_engine();
      if (ends_unseen_) engine.queue_callback([self = shared_from_this()] { self->delay_all_reduce(); });
      for (const auto unused : parts_.used.unused()) {
        parts_.own_averages.before_accumulation(unused);
        parts_.weights.prepare(unused, !parts_.used.is_used_here(unused));
        arrive(unused, Mark::kUnused, nullptr);
      }
    };
    if (!parts_.step.begun() && !parts_.step.begin(begin)) return;  // it has failed on another device's thread
    if (parts_.static_graph.is_last(param, incoming)) arrive(param, Mark::kUsed, incoming);
    parts_.context.transport->progress();
  });
}

// False if another reducer takes it.
bool Reducer::take_main_grad(int64_t param) {
  auto& context = parts_.context;
  if (!context.main_grads->is_taken(param)) return false;
  if (auto& grad = context.params[param].mutable_grad(); grad.defined()) {
    context.main_grads->take(param, std::exchange(grad, at::Tensor()), parts_.step.armed());
  }
  return true;
}

void Reducer::begin_backward() {
  parts_.events.begin_backward();
  parts_.context.rpc = torch::distributed::autograd::ThreadLocalDistAutogradContext::getContextPtr();
  parts_.packed.begin_backward(hooks_->has_foreign_hooks() || parts_.hook);
  if (parts_.weights.is_open()) parts_.queue.agree();
  parts_.step.set_scale(parts_.weights.begin());
}

void Reducer::arrive(int64_t param, Mark mark, const at::Tensor* incoming) {
  const bool unused = mark == Mark::kUnused;
  if (const auto before = parts_.step.mark(param, mark); before != Mark::kNone) {
    throw GraphError(marked_twice_message(parts_.context, param, before == Mark::kUnused));
  }
  if (!unused) parts_.step.add_to_order(param);
  parts_.events.grad_ready(param);
  parts_.packers.pack(param, unused, incoming);
  const auto& place = parts_.layout.place(param);
  if (place.bucket->arrive() && parts_.queue.ready(place.index, param, incoming)) queue_finalize();
}

// Averages are handed back once the whole backward has ended: another reducer may have to pack the same gradients until then.
void Reducer::queue_finalize() {
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this()] { self->guarded([&] { self->finalize(); }); });
}

// Packs the gradients that exist, without hooks. `is_used` tells which parameters count as used.
template <typename IsUsed>
void Reducer::pack_all(IsUsed&& is_used) {
  for (int64_t index = 0; index < parts_.layout.size(); ++index) {
    for (const auto param : parts_.layout.bucket(index).params()) {
      const bool unused = !is_used(param);
      parts_.own_averages.before_accumulation(param);
      parts_.weights.prepare(param, unused);
      parts_.step.mark(param, unused ? Mark::kUnused : Mark::kUsed);
      parts_.packers.pack(param, unused, nullptr);
    }
    parts_.queue.ready(index);
    parts_.context.transport->progress();
  }
}

void Reducer::delay_all_reduce() {
  if (!parts_.step.armed() || !parts_.static_graph.recording()) return;
  const auto* const wanted = torch::autograd::get_current_graph_task_exec_info();
  ends_unseen_ = wanted != nullptr && !wanted->empty() && !parts_.static_graph.has_recorded();  // of autograd.grad()
  if (ends_unseen_) return;
  guarded([&] {
    parts_.step.begin([&] { begin_backward(); });
    follow_measurement();
    parts_.used.take_from_graph();
    pack_all([&](int64_t param) { return parts_.static_graph.was_used(param); });
    parts_.static_graph.finish_recording();
    // Lightning calls this after a backward of manual optimization; torch's module calls it at the end of a backward.
    wanted == nullptr ? finalize() : queue_finalize();
  });
}

// The earlier backwards without reduction have marked what was used: there are no outputs to search from.
void Reducer::reduce_now() {
  begin_step();
  parts_.packed.begin_step(/*has_hooks=*/false);
  arm();
  guarded([&] {
    begin_backward();
    pack_all([&](int64_t param) { return parts_.used.is_used_here(param); });
    finalize();
  });
}

void Reducer::match_step() {
  guarded([&] {
    follow_measurement();
    take_part();
    parts_.events.end_matched_step();
  });
}

void Reducer::finalize() {
  parts_.step.disarm();
  parts_.context.transport->end_backward();
  parts_.events.backward_computed();
  const c10::NoGradGuard no_grad;
  for (int64_t index = 0; index < parts_.layout.size(); ++index) {
    auto& bucket = parts_.layout.bucket(index);
    if (bucket.state() == bucket::BucketState::kInFlight) {
      parts_.queue.finish(index);
      parts_.layout.measure(index);  // while it is in cache
      parts_.non_finite.look_at_average(bucket, parts_.layout.reduction(index).is_known_finite());
    }
    if (bucket.state() == bucket::BucketState::kReduced) {  // perhaps during backward
      parts_.hand_back.run(bucket);
    }
  }
  parts_.events.all_reduced();
  const auto late = parts_.step.take_late();
  for (size_t i = late.size(); i > 0; --i) {  // of several of a parameter, what was there first remains
    parts_.hand_back.finish(late[i - 1]);
  }
  parts_.own_averages.finish();
  parts_.packers.end_step();
  parts_.layout.end_step();
  parts_.used.finish();
  parts_.futures.wait();
  parts_.keeper.measure(parts_.step);
  parts_.divisor.forget_forward_work();
  parts_.context.rpc.reset();
  parts_.weights.finish();
  parts_.step.end();
  parts_.events.end_step();
  parts_.changes.handed_back();
  parts_.non_finite.publish();
  parts_.non_finite.raise_if_bad();
  if (!parts_.hook || parts_.context.has_own_storage()) parts_.packed.report();
  parts_.weights.raise_if_zero();
}

// Hooks of other devices may still be running. They launch nothing after this, and what they use without a lock stays unchanged
// until the next step begins.
void Reducer::abandon() {
  parts_.step.disarm();
  parts_.non_finite.publish();  // may be the cause
  parts_.events.live().abandon_step();
  parts_.context.transport->end_backward();
  parts_.queue.abandon();
  parts_.step.take_late();
  parts_.futures.abandon();
}

bool Reducer::rebuild_buckets() {
  check_not_unfinished();
  // torch.func may run this forward, but the buckets are none of its tensors.
  const c10::impl::ExcludeDispatchKeyGuard no_transforms(c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode}));
  return parts_.keeper.rebuild();
}

void Reducer::set_static_graph() {
  if (const auto steps = parts_.events.steps(); steps != 0) {
    fail(c10::str(
        "set_static_graph() should be called before training loop starts and after DistributedDataParallel is ",
        "constructed; on rank ", parts_.context.rank(), " ", steps, " steps have begun."));
  }
  parts_.static_graph.enable();
  parts_.used.make_map();
}

void Reducer::share_gradients() {
  auto& context = parts_.context;
  if (context.shares_gradients) return;
  check_not_unfinished();
  TDDP_CHECK(!context.owned && context.main_grads == nullptr, "rank ", context.rank(),
             ": two wrappers reduce the same parameters in one backward, but one of them keeps gradients in buckets ",
             "(a sharded model, or main gradients): wrap once");
  parts_.layout.give_up_views();
  context.views = false;
  context.shares_gradients = true;
  parts_.layout.adapt();
  if (parts_.step.armed()) {
    parts_.layout.begin_step();
    parts_.packers.begin_step();
  }
}

void Reducer::take_over(const Reducer& before) {
  const auto places = parts_.context.places_in(before.parts_.context);
  parts_.own_averages.take_over(before.parts_.own_averages, places);
  parts_.used.take_over(before.parts_.used, places);
  parts_.events.take_over(before.parts_.events);
  parts_.marks.take_over(before.parts_.marks, places);
  parts_.weights.take_over(before.parts_.weights, places);
  if (parts_.weights.listens()) hooks_->call_before();
  if (before.parts_.step.armed()) {
    begin_step();
    parts_.packed.begin_step(/*has_hooks=*/true);
    parts_.used.take_over_search(before.parts_.used, places);
    arm();
  }
}

void Reducer::check_not_unfinished() {
  if (!parts_.step.is_unfinished()) return;
  fail(unfinished_reduction_message(parts_.context, parts_.step.unmarked(), parts_.static_graph.enabled(),
                                    c10d::debug_level() == c10d::DebugLevel::Off));
}

}  // namespace torchddp::reducer
