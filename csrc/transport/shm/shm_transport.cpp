#include "transport/shm/shm_transport.h"

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <cstring>

#include "common/check.h"
#include "transport/c10d/c10d_transport.h"
#include "transport/c10d/group_work.h"
#include "transport/sum_types.h"

namespace torchddp::transport {

// An operation of the engine with its tensors, or one of the process group for what shared memory can't do.
class ShmWork final : public Work {
 public:
  ShmWork(std::shared_ptr<ShmTransport> transport, std::unique_ptr<Work> group_work)
      : transport_(std::move(transport)), engine_(*transport_->engine_), group_work_(std::move(group_work)) {}
  ~ShmWork() override { give_up(); }

  bool poll() override {
    if (!active_) return group_work_ == nullptr || group_work_->poll();
    try {
      return engine_.poll(seq_);
    } catch (const TransportError&) {
      return true;  // wait() reports what happened
    }
  }

  void wait(std::chrono::milliseconds timeout) override {
    if (!active_) {
      if (group_work_ != nullptr) group_work_->wait(timeout);
      return;
    }
    const auto limit = timeout == kTransportTimeout ? transport_->timeout_ : timeout;
    wait_or_keep(transport_->placement_.outer_group, [&] { engine_.wait(seq_, limit); });
    active_ = false;
    if (memory.deliver) {
      const c10::NoGradGuard no_grad;
      memory.deliver();
    }
    forget();
  }

  void abandon() override {
    if (group_work_ != nullptr) group_work_->abandon();
    give_up();
  }

  void begin(uint64_t seq) {
    seq_ = seq;
    active_ = true;
  }
  // The range torch.profiler shows for the operation: from here to the end of wait().
  void record(const std::string& title, const at::Tensor& tensor) {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!callbacks) return;
    record_.emplace(std::move(*callbacks));
    record_->_setAsync();
    const c10::IValue input(tensor);
    record_->before(title, c10::ArrayRef<const c10::IValue>(input));
  }
  // Where the next operation counts.
  std::shared_ptr<shm::NonFinite> count_anew() {
    // An abandoned operation may still add to the old one.
    if (non_finite_ == nullptr || non_finite_.use_count() > 1) non_finite_ = std::make_shared<shm::NonFinite>();
    non_finite_->inputs.store(0);
    non_finite_->sums_finite.store(false);
    return non_finite_;
  }
  int64_t non_finite() const override { return non_finite_ == nullptr ? 0 : non_finite_->inputs.load(); }
  bool sums_finite() const override { return non_finite_ != nullptr && non_finite_->sums_finite.load(); }

  void check_idle() const { TDDP_INTERNAL(!active_, "an operation on a Work whose last one was not waited for"); }
  Work& group_work() { return *group_work_; }

  OperationMemory memory;  // of the current operation

 private:
  void give_up() {
    if (active_) {
      transport_->keep({memory.input, memory.output, memory.staging}, seq_);
      active_ = false;
    }
    forget();
  }

  void forget() {
    if (record_) {
      record_->end();
      record_.reset();
    }
    memory = {};
  }

  std::optional<at::RecordFunction> record_;
  std::shared_ptr<ShmTransport> transport_;
  shm::Engine& engine_;
  std::unique_ptr<Work> group_work_;
  std::shared_ptr<shm::NonFinite> non_finite_;
  uint64_t seq_ = 0;
  bool active_ = false;
};

namespace {

using Kind = Collective::Kind;

bool is_dense_cpu(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided;
}

// The type in which the engine sums it. Empty: the process group has to.
std::optional<kernels::DType> type_of(const at::Tensor& tensor) {
  return is_dense_cpu(tensor) ? sum_type(tensor.scalar_type()) : std::nullopt;
}

std::string no_room(int rank, int64_t bytes, const char* then = "") {
  return c10::str(
      "rank ", rank, ": no room for ", bytes, " bytes of shared memory (", std::strerror(errno), ")", then,
      ". Shared memory counts toward the memory of the container or cgroup; TORCHDDP_SHM_LIMIT_MB limits it, too.");
}

}  // namespace

ShmTransport::ShmTransport(c10::intrusive_ptr<c10d::ProcessGroup> group, ShmPlacement placement,
                           std::shared_ptr<ShmChannel> channel, std::chrono::milliseconds timeout)
    : Transport(Route::kShm, {.reaches_any_memory = false, .scales = true, .narrows = true, .is_network = false}),
      placement_(std::move(placement)), timeout_(timeout), channel_(std::move(channel)),
      segment_(channel_->mesh()->segment()), pool_(std::make_shared<GradientPool>(segment_)),
      engine_(&channel_->engine()), rank_(placement_.local_ranks[channel_->mesh()->rank()]),
      size_(group != nullptr ? group->getSize() : channel_->mesh()->size()) {
  // Named as the process group names them, since tools that read profiles know those names.
  const auto backend = group != nullptr ? group->getBackendName() : std::string("shm");
  for (size_t kind = 0; kind < titles_.size(); ++kind) {
    titles_[kind] = backend + ":" + shm::kind_name(static_cast<shm::OpKind>(kind));
  }
  if (group != nullptr) c10d_ = std::make_shared<C10dTransport>(std::move(group));
}

// Undefined, with errno set, if there is no room.
at::Tensor ShmTransport::try_allocate(int64_t numel, at::ScalarType dtype) {
  const auto bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  auto* memory = segment_->allocate(bytes);
  if (memory == nullptr && scratch().trim(0)) memory = segment_->allocate(bytes);
  if (memory == nullptr) return {};
  auto segment = segment_;  // the mapping outlives the transport for as long as it holds a gradient
  return at::from_blob(memory, {numel}, [segment](void* block) { segment->release(block); }, at::dtype(dtype));
}

at::Tensor ShmTransport::allocate(int64_t numel, at::ScalarType dtype, at::Device device) {
  if (device.is_cpu()) {
    if (auto memory = try_allocate(numel, dtype); memory.defined()) return memory;
    const auto bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
    TORCH_WARN(no_room(rank_, bytes, ": the ranks continue over the process group"));
    lost_memory_ = true;
  }
  return Transport::allocate(numel, dtype, device);
}

at::Tensor ShmTransport::shared_bytes(int64_t bytes, bool for_all) {
  if (auto memory = try_allocate(bytes, at::kByte); memory.defined()) return memory;
  const auto problem = no_room(rank_, bytes);
  if (for_all) engine_->give_up(problem);
  throw TransportError(problem);
}

std::unique_ptr<Work> ShmTransport::make_work() {
  return std::make_unique<ShmWork>(shared_from_this(), c10d_ != nullptr ? c10d_->make_work() : nullptr);
}

// `input` and `output` may be undefined where the operation has none on this rank.
void ShmTransport::run(Work& work, shm::Operation operation, const at::Tensor& input, const at::Tensor& output) {
  auto& mine = own<ShmWork>(work);
  mine.check_idle();
  channel_->drop_finished();
  const c10::NoGradGuard no_grad;
  mine.memory.input = input;
  mine.memory.output = output;
  operation.input = input.defined() ? input.const_data_ptr() : nullptr;
  operation.output = output.defined() ? output.mutable_data_ptr() : nullptr;
  if (input.defined() && !engine_->is_eager(operation) && !reaches(input)) {
    mine.memory.stage(*this, input);
    operation.input = data_of(mine.memory.staging);
    if (operation.kind == shm::OpKind::kAllReduce || (operation.kind == shm::OpKind::kReduce && output.defined())) {
      operation.output = data_of(mine.memory.staging);
      mine.memory.deliver_to({output}, mine.memory.staging);
    }
  }
  mine.record(titles_[static_cast<size_t>(operation.kind)], input.defined() ? input : output);
  mine.begin(wait_or_keep(placement_.outer_group, [&] { return engine_->start(operation); }));
  count_operation(operation);
}

void ShmTransport::count_operation(const shm::Operation& operation) {
  const auto mine = moved(operation, engine_->board());
  count(Route::kShm, operation.bytes() * (operation.kind == shm::OpKind::kAllGather ? size_ : 1), mine.bytes);
  if (mine.outer_numel == 0) return;
  const auto bytes = mine.outer_numel * kernels::item_size(operation.type);
  const auto hosts = placement_.outer_group->getSize();
  // 16-bit floats are gathered and not summed by the process group: see C10dOuterLink.
  const auto& sent = operation.outer_type;
  count(Route::kOuter, bytes,
        sent ? one_way_bytes(hosts * mine.outer_numel * kernels::item_size(*sent), hosts)
             : all_reduce_bytes(bytes, hosts));
}

bool ShmTransport::goes_through_group(const Collective& operation) const {
  const auto kind = operation.kind;
  if (kind == Kind::kBarrier) return placement_.spans;
  const bool moves = kind == Kind::kAllGather || kind == Kind::kBroadcast;
  if (moves ? !is_dense_cpu(operation.input) : !type_of(operation.input)) return true;
  return placement_.spans && (kind == Kind::kReduceScatter || kind == Kind::kAllGather ||
                              (kind == Kind::kBroadcast && placement_.outer_ranks[operation.root] < 0));
}

void ShmTransport::launch(const Collective& operation, Work& work) {
  const auto& input = operation.input;
  if (goes_through_group(operation)) {
    auto plain = operation;
    plain.options = {};
    c10d_->start(plain, own<ShmWork>(work).group_work());
    return;
  }
  switch (operation.kind) {
    case Kind::kReduceScatter:
      run(work, {.kind = shm::OpKind::kReduceScatter, .type = *sum_type(input.scalar_type()), .numel = input.numel()},
          input, operation.output);
      break;
    case Kind::kAllGather:
      run(work, of_bytes(shm::OpKind::kAllGather, bytes_of(input)), input, operation.output);
      break;
    case Kind::kBroadcast: start_broadcast(input, operation.root, work); break;
    case Kind::kBarrier: run(work, {}, {}, {}); break;
    default: start_sum(operation, work);
  }
}

void ShmTransport::start_sum(const Collective& sum, Work& work) {
  const auto& tensor = sum.input;
  shm::Operation operation{.kind = shm::OpKind::kAllReduce,
                           .type = *sum_type(tensor.scalar_type()),
                           .numel = tensor.numel(),
                           .scale = sum.options.scale};
  // Between hosts, the ranks that own shards sum them even if only one rank wants the result: each byte crosses the link once,
  // and the other ranks get more than they asked for.
  if (sum.kind == Kind::kReduce && !placement_.spans) {
    operation.kind = shm::OpKind::kReduce;
    operation.root = sum.root;
    run(work, operation, tensor, sum.root == engine_->board().rank() ? tensor : at::Tensor());
    return;
  }
  if (sum.options.outer_dtype && operation.type == kernels::DType::kF32) {
    operation.outer_type = sum_type(*sum.options.outer_dtype);
  }
  if (sum.options.count_non_finite) operation.non_finite = own<ShmWork>(work).count_anew();
  run(work, operation, tensor, tensor);
}

bool ShmTransport::counts_non_finite(const at::Tensor& tensor) const {
  const auto type = type_of(tensor);
  return type && at::isFloatingType(tensor.scalar_type()) &&
         !engine_->is_eager({.kind = shm::OpKind::kAllReduce, .type = *type, .numel = tensor.numel()});
}

void ShmTransport::start_broadcast(const at::Tensor& tensor, int root, Work& work) {
  // Between hosts it goes to the ranks with the root's place on each host, which then act as roots there: it crosses the link
  // once.
  const int local_root = placement_.spans ? placement_.places[root] : root;
  const bool is_root = local_root == engine_->board().rank();
  if (placement_.spans && is_root) broadcast_between_hosts(tensor, placement_.outer_ranks[root]);
  run(work, of_bytes(shm::OpKind::kBroadcast, bytes_of(tensor), local_root), is_root ? tensor : at::Tensor(),
      is_root ? at::Tensor() : tensor);
}

void ShmTransport::broadcast_between_hosts(const at::Tensor& tensor, int root) {
  std::vector<at::Tensor> tensors{tensor};
  const auto& group = placement_.outer_group;
  try {
    wait_or_throw(*group->broadcast(tensors, {.rootRank = root}), group, interruption(), is_gloo(*group));
  } catch (const SignalInterrupt&) {
    engine_->interrupt(c10::str("rank ", rank_, " gave up: a signal handler raised an exception in a broadcast"));
    throw;
  } catch (const std::exception& error) {
    interruption().check();
    engine_->give_up("the broadcast between hosts failed: " + reason_of(error));  // the others of this host wait for us
  }
  count(Route::kOuter, bytes_of(tensor), one_way_bytes(bytes_of(tensor), group->getSize()));
}

}  // namespace torchddp::transport
