// Set-up of the Reducer, and the special modes that torch's DDP switches on.
#include <ATen/Functions.h>

#include <torch/csrc/distributed/c10d/debug.h>

#include <algorithm>

#include "common/check.h"
#include "reducer/messages.h"
#include "reducer/reducer_inl.h"
#include "transport/cuda/cuda_device.h"

namespace torchddp::reducer {

Reducer::Reducer(std::vector<at::Tensor> params, std::vector<plan::ParamSpec> specs,
                 c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<transport::Transport> transport,
                 ReducerConfig config)
    : params_(std::move(params)),
      specs_(std::move(specs)),
      config_(std::move(config)),
      group_(std::move(group)),
      transport_(std::move(transport)),
      owned_(std::any_of(specs_.begin(), specs_.end(), [](const auto& spec) { return spec.owner >= 0; })),
      views_(config_.gradient_as_bucket_view) {
  TDDP_CHECK(!params_.empty(), "Expected at least one parameter.");
  TDDP_CHECK(!config_.wire_dtype || transport_->narrows(),
             "wire_dtype needs shared memory (transport='shm'), but buckets go through ", transport_->name());
  TDDP_CHECK(params_.size() == specs_.size(), "got ", params_.size(), " parameters but ", specs_.size(),
             " descriptions of them");
  check_owners();
  const auto count = static_cast<int64_t>(params_.size());
  const auto device = params_.front().device();
  const bool on_one =
      std::all_of(params_.begin(), params_.end(), [&](const at::Tensor& p) { return p.device() == device; });
  if (device.is_cuda() && on_one) {
    device_ = transport::cuda_device(device.index());
  }
  if (device_ != nullptr) {
    fork_ = device_->make_event();
  }
  marked_ = std::make_unique<std::atomic<uint8_t>[]>(params_.size());
  ready_order_.resize(params_.size());
  reduced_.assign(params_.size(), 0);
  kept_.resize(params_.size());
  if (config_.find_non_finite || config_.raise_non_finite) {
    non_finite_ = std::make_unique<NonFiniteLog>(count);
  }
  apply_plan(plan::make_bucket_plan(specs_, plan::reverse_registration_order(count), config_.limits));
  agree_on_memory();
  if (config_.find_unused_parameters) {
    used_map_ = std::make_unique<UsedMap>(count, params_.front().device(), *transport_);
  }
  hooks_ = std::make_unique<GradHooks>(params_, *this, owned_);
  search_ = std::make_unique<UnusedSearch>(*hooks_);
}

Reducer::~Reducer() {
  if (fork_ != nullptr) {
    device_->destroy_event(fork_);
  }
}

void Reducer::check_compiled_autograd() const {
  TDDP_CHECK(config_.compiled_autograd_takes_over,
             "Compiled autograd is not compatible with C++ DDP Reducer, please use ",
             "torch._dynamo.config.optimize_ddp=\"python_reducer\".");
}

std::vector<c10d::GradBucket> Reducer::zero_grad_buckets() {
  std::vector<c10d::GradBucket> result;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    auto& bucket = *buckets_[i];
    const auto zeros = bucket.is_sparse() ? no_rows(params_[static_cast<size_t>(bucket.params().front())])
                                          : at::zeros_like(bucket.wire());
    result.push_back(
        make_grad_bucket(static_cast<int64_t>(i), static_cast<int64_t>(buckets_.size()), bucket, params_, zeros));
  }
  return result;
}

void Reducer::set_static_graph() {
  if (stats_.steps != 0) {
    auto text = c10::str(
        "set_static_graph() should be called before training loop starts and after DistributedDataParallel is ",
        "constructed; on rank ", transport_->rank(), " ", stats_.steps, " steps have begun.");
    live_->set_error(text);
    throw std::runtime_error(text);
  }
  static_graph_.enable(static_cast<int64_t>(params_.size()));
  if (used_map_ == nullptr) {
    used_map_ = std::make_unique<UsedMap>(static_cast<int64_t>(params_.size()), params_.front().device(), *transport_);
  }
}

void Reducer::register_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  comm_hook_.install(std::move(hook));
}

void Reducer::register_builtin_comm_hook(c10d::BuiltinCommHookType type) {
  comm_hook_.install_builtin(type, group_);
}

c10::intrusive_ptr<c10::ivalue::Future> Reducer::run_comm_hook(c10d::GradBucket& bucket) {
  return comm_hook_ ? comm_hook_.run(bucket) : run_allreduce_hook(bucket);
}

// What a rank without inputs does for each bucket that the others reduce; the result is there on return.
c10::intrusive_ptr<c10::ivalue::Future> Reducer::run_allreduce_hook(c10d::GradBucket& bucket) {
  const auto& buffer = bucket.getBufferRef();
  auto work = transport_->make_work();
  const WaitScope waits(*live_, "a bucket that ranks with inputs reduce");
  auto options = sum_options(static_cast<int64_t>(bucket.getIndex()));
  options.scale = 1.0;  // zeros, or what a hook of torch's has scaled
  transport_->all_reduce(buffer, *work, options);
  work->wait(config_.timeout);
  // With the device, so that who waits for it on another stream waits for this one.
  std::vector<c10::Device> devices;
  if (!buffer.device().is_cpu()) {
    devices.push_back(buffer.device());
  }
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::move(devices));
  future->markCompleted(c10::IValue(std::vector<at::Tensor>{buffer}));
  return future;
}

void Reducer::install_futures(const c10::List<c10::intrusive_ptr<c10::ivalue::Future>>& futures) {
  const std::lock_guard lock(late_mutex_);
  if (futures_) {
    futures_->append(futures);
  } else {
    futures_ = futures.copy();
  }
}

void Reducer::set_forward_pass_work_handle(c10::intrusive_ptr<c10d::Work> work, bool use_static_world_size) {
  forward_work_ = std::move(work);
  forward_work_static_world_ = use_static_world_size;
}

void Reducer::update_process_group(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                   std::shared_ptr<transport::Transport> transport) {
  group_ = std::move(group);
  use_transport(std::move(transport));
  agree_on_memory();
}

void Reducer::match_used_map() {
  TDDP_CHECK(used_map_ != nullptr, "there is no map of used parameters to match");
  auto none = at::zeros_like(used_map_->device_map());
  auto work = transport_->make_work();
  const WaitScope waits(*live_, kWaitsForUsedMap);
  transport_->all_reduce(none, *work);
  work->wait(config_.timeout);
}

void Reducer::reset_state() {
  abandon_step();
  has_rebuilt_ = false;
  measured_order_.clear();
  if (static_graph_.enabled()) {
    static_graph_.restart_recording();
  }
}

at::Tensor Reducer::local_used_map() {
  TDDP_CHECK(used_map_ != nullptr,
             "the map of used parameters exists only with find_unused_parameters or static_graph");
  return used_map_->device_map();
}

std::vector<int64_t> Reducer::grad_ready_order() const {
  return {ready_order_.begin(), ready_order_.begin() + live_->num_ready.load(std::memory_order_relaxed)};
}

int64_t Reducer::forward_ns() const {
  return ready_clock_ != nullptr ? ready_clock_->forward_ns() : stats_.last.forward_ns();
}

std::vector<int64_t> Reducer::backward_stats() const {
  if (ready_clock_ != nullptr) {
    return ready_clock_->read_ns();
  }
  return ready_times_ns_.empty() ? std::vector<int64_t>(params_.size(), 0) : ready_times_ns_;
}

void Reducer::record_ready_times(bool record) {
  if (record) {
    ready_times_ns_.assign(params_.size(), 0);
  }
  records_ready_times_ = record;
  ready_clock_ = record && device_ != nullptr ? std::make_unique<gpu::ReadyClock>(device_, params_.size()) : nullptr;
}

void Reducer::enable_timeline(int64_t capacity) {
  ready_times_ns_.assign(params_.size(), 0);
  timeline_.enable(capacity);
}

int64_t Reducer::unused_bytes() const {
  int64_t bytes = 0;
  for (const auto param : unused_) {
    bytes += specs_[static_cast<size_t>(param)].bytes();
  }
  return bytes;
}

int64_t Reducer::bucket_memory_bytes() const {
  int64_t bytes = 0;
  for (const auto& bucket : buckets_) {
    bytes += bucket->has_memory() ? bucket->bytes() : 0;
  }
  return bytes + lent_.bytes();
}

void Reducer::check_finalized() {
  if (is_unfinished()) {
    raise_unfinished();
  }
  TDDP_CHECK(!armed_.load(std::memory_order_acquire),
             "Expected to have finished reduction: the last synchronised forward on rank ", transport_->rank(),
             " was not followed by a backward that reached every bucket. Call backward() on its output first.");
}

void Reducer::raise_unfinished() {
  std::vector<int64_t> missing;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (marked_[i].load(std::memory_order_relaxed) == 0) {
      missing.push_back(static_cast<int64_t>(i));
    }
  }
  auto text = unfinished_reduction_message(transport_->rank(), missing, specs_, config_.find_unused_parameters,
                                           static_graph_.enabled(), c10d::debug_level() == c10d::DebugLevel::Off);
  live_->set_error(text);
  throw std::runtime_error(text);
}

}  // namespace torchddp::reducer
