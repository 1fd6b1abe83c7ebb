#include "transport/nccl/nccl_transport.h"

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>

#include "common/check.h"

namespace torchddp::transport {
namespace {

using gpu::NcclType;

class NcclWork final : public Work {
 public:
  explicit NcclWork(std::shared_ptr<gpu::Communicator> communicator) : communicator_(std::move(communicator)) {}
  ~NcclWork() override { communicator_->forget(ticket); }

  bool poll() override { return !under_way || communicator_->ended(ticket); }
  void wait(std::chrono::milliseconds) override {
    if (under_way) {
      communicator_->join(ticket);
      under_way = false;
    }
  }
  void abandon() override { under_way = false; }

  bool belongs_to(const gpu::Communicator& communicator) const { return communicator_.get() == &communicator; }

  gpu::Ticket ticket;
  bool under_way = false;

 private:
  std::shared_ptr<gpu::Communicator> communicator_;
};

// Of the elements that travel: a bool is a byte, 0 or 1.
NcclType type_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kChar:
      return NcclType::kI8;
    case at::kByte:
    case at::kBool:
      return NcclType::kU8;
    case at::kInt:
      return NcclType::kI32;
    case at::kLong:
      return NcclType::kI64;
    case at::kHalf:
      return NcclType::kF16;
    case at::kFloat:
      return NcclType::kF32;
    case at::kDouble:
      return NcclType::kF64;
    case at::kBFloat16:
      return NcclType::kBF16;
    default:
      TDDP_CHECK(false, "NCCL does not sum tensors of dtype ", dtype);
  }
}

}  // namespace

NcclTransport::NcclTransport(std::shared_ptr<gpu::Communicator> communicator, at::Device device)
    : communicator_(std::move(communicator)), device_(device) {
  TDDP_CHECK(device.is_cuda(), "NCCL moves CUDA tensors, got device ", device);
}

at::Tensor NcclTransport::allocate(int64_t numel, at::ScalarType dtype, at::Device device) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  if (device != device_ || numel == 0) {
    return at::empty({numel}, options);
  }
  auto memory = communicator_->allocate(numel * static_cast<int64_t>(c10::elementSize(dtype)));
  auto* const data = memory.get();
  return at::from_blob(data, {numel}, {1}, 0, [memory = std::move(memory)](void*) {}, options, device);
}

std::unique_ptr<Work> NcclTransport::make_work() { return std::make_unique<NcclWork>(communicator_); }

void NcclTransport::check_device(const char* operation, const at::Tensor& tensor) const {
  TDDP_CHECK(tensor.device() == device_, operation, " on rank ", rank(), " through NCCL needs a tensor on ", device_,
             ", got one on ", tensor.device());
}

template <typename Call>
void NcclTransport::start(Work& work, gpu::OperationLabel label, const at::Tensor& written, const at::Tensor& read,
                          Call&& call) {
  auto* mine = dynamic_cast<NcclWork*>(&work);
  TDDP_INTERNAL(mine != nullptr && mine->belongs_to(*communicator_), "a Work of another transport was given to NCCL");
  TDDP_INTERNAL(!mine->under_way, label.name, " on a Work whose last operation was not waited for");
  auto memory = std::make_shared<std::pair<at::Storage, at::Storage>>(written.storage(), read.storage());
  communicator_->start(mine->ticket, label, std::forward<Call>(call), std::move(memory));
  mine->under_way = true;
}

void NcclTransport::all_reduce(const at::Tensor& tensor, Work& work, const SumOptions& options) {
  TDDP_INTERNAL(options.scale == 1.0 && !options.wire, "NCCL neither scales nor narrows");
  check_flat("all_reduce", tensor);
  check_device("all_reduce", tensor);
  const auto type = type_of(tensor.scalar_type());
  auto* const data = tensor.mutable_data_ptr();
  const auto numel = tensor.numel();
  auto& nccl = communicator_->nccl();
  start(work, {"all_reduce", numel, options.bucket}, tensor, tensor, [&, data](gpu::Comm comm, gpu::Stream stream) {
    return nccl.all_reduce(data, data, numel, type, comm, stream);
  });
  count(Route::kNccl, bytes_of(tensor), all_reduce_bytes(bytes_of(tensor), size()));
}

void NcclTransport::reduce(const at::Tensor& tensor, int root, Work& work, const SumOptions& options) {
  TDDP_INTERNAL(options.scale == 1.0 && !options.wire, "NCCL neither scales nor narrows");
  check_rooted("reduce", tensor, root);
  check_device("reduce", tensor);
  const auto type = type_of(tensor.scalar_type());
  auto* const data = tensor.mutable_data_ptr();
  const auto numel = tensor.numel();
  auto& nccl = communicator_->nccl();
  start(work, {"reduce", numel, options.bucket}, tensor, tensor,
        [&, data](gpu::Comm comm, gpu::Stream stream) { return nccl.reduce(data, numel, type, root, comm, stream); });
  count(Route::kNccl, bytes_of(tensor), reduce_bytes(bytes_of(tensor), rank() == root));
}

void NcclTransport::reduce_scatter(const at::Tensor& output, const at::Tensor& input, Work& work) {
  check_reduce_scatter(output, input);
  check_device("reduce_scatter", output);
  check_device("reduce_scatter", input);
  const auto type = type_of(output.scalar_type());
  auto& nccl = communicator_->nccl();
  start(work, {"reduce_scatter", input.numel()}, output, input, [&](gpu::Comm comm, gpu::Stream stream) {
    return nccl.reduce_scatter(input.const_data_ptr(), output.mutable_data_ptr(), output.numel(), type, comm, stream);
  });
  count(Route::kNccl, bytes_of(input), one_way_bytes(bytes_of(input), size()));
}

void NcclTransport::all_gather(const at::Tensor& output, const at::Tensor& input, Work& work) {
  check_all_gather(output, input);
  check_device("all_gather", output);
  check_device("all_gather", input);
  auto& nccl = communicator_->nccl();
  // Operations that move and do not sum take every dtype, as bytes.
  start(work, {"all_gather", output.numel()}, output, input, [&](gpu::Comm comm, gpu::Stream stream) {
    return nccl.all_gather(input.const_data_ptr(), output.mutable_data_ptr(), bytes_of(input), NcclType::kU8, comm,
                           stream);
  });
  count(Route::kNccl, bytes_of(output), one_way_bytes(bytes_of(output), size()));
}

void NcclTransport::broadcast(const at::Tensor& tensor, int root, Work& work) {
  check_rooted("broadcast", tensor, root);
  check_device("broadcast", tensor);
  auto& nccl = communicator_->nccl();
  start(work, {"broadcast", tensor.numel()}, tensor, tensor, [&](gpu::Comm comm, gpu::Stream stream) {
    return nccl.broadcast(tensor.mutable_data_ptr(), bytes_of(tensor), NcclType::kU8, root, comm, stream);
  });
  count(Route::kNccl, bytes_of(tensor), one_way_bytes(bytes_of(tensor), size()));
}

void NcclTransport::interrupt(const std::string& reason) {
  Transport::interrupt(reason);
  communicator_->interrupt(reason);
}

void NcclTransport::barrier(Work& work) {
  if (!nothing_.defined()) {
    nothing_ = at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device_));
  }
  all_reduce(nothing_, work);
}

}  // namespace torchddp::transport
