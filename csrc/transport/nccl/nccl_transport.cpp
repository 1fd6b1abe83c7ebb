#include "transport/nccl/nccl_transport.h"

#include <ATen/Functions.h>
#include <ATen/ops/_foreach_mul.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <vector>

#include "common/check.h"
#include "gpu/nccl.h"
#include "transport/cuda/cuda_device.h"
#include "transport/sum_types.h"

namespace torchddp::transport {
namespace {

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

// For the elements that are summed: a bool is a byte, 0 or 1. Operations that only move data take every dtype as bytes.
kernels::DType type_of(const Collective& operation) {
  using Kind = Collective::Kind;
  const auto dtype = operation.input.scalar_type();
  if (operation.kind == Kind::kAllGather || operation.kind == Kind::kBroadcast || dtype == at::kBool) {
    return kernels::DType::kU8;
  }
  const auto type = sum_type(dtype);
  TDDP_CHECK(type && *type != kernels::DType::kI16, "NCCL can't sum tensors of dtype ", dtype);
  return *type;
}

// The factor that NCCL applies to these tensors. A scale that it would round is applied here.
double scale_for_nccl(const InPlace& in_place, kernels::DType type) {
  if (gpu::can_scale_by(type, in_place.scale)) return in_place.scale;
  const c10::NoGradGuard no_grad;
  at::_foreach_mul_(at::TensorList(in_place.tensors.data(), in_place.tensors.size()), in_place.scale);
  return 1.0;
}

}  // namespace

NcclTransport::NcclTransport(std::shared_ptr<gpu::Communicator> communicator, at::Device device,
                             std::chrono::milliseconds timeout, bool sums_in_place)
    : Transport(Route::kNccl, {.sums_in_place = sums_in_place, .scales_in_place = sums_in_place}),
      communicator_(std::move(communicator)), device_(device), timeout_(timeout) {
  TDDP_CHECK(is_gpu(device), "NCCL only moves CUDA tensors, got device ", device);
}

std::unique_ptr<Work> NcclTransport::make_work() { return std::make_unique<NcclWork>(communicator_); }

void NcclTransport::launch(const Collective& operation, Work& work) {
  using Kind = Collective::Kind;
  const auto& [kind, output, input, root, options, in_place] = operation;
  if (kind == Kind::kBarrier) {
    if (!nothing_.defined()) {
      nothing_ = at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device_));
    }
    start(Collective::all_reduce(nothing_), work);
    return;
  }
  const auto check_device = [&](const at::Tensor& tensor) {
    TDDP_CHECK(tensor.device() == device_, operation.name(), " on rank ", rank(), " through NCCL needs a tensor on ",
               device_, ", got one on ", tensor.device());
  };
  auto memory = std::make_shared<std::vector<at::Storage>>();  // for as long as NCCL uses it
  for (const auto& tensor : {output, input}) {
    check_device(tensor);
    memory->push_back(tensor.storage());
  }
  std::vector<gpu::Memory> pieces;
  for (const auto& tensor : in_place.tensors) {
    check_device(tensor);
    memory->push_back(tensor.storage());
    pieces.push_back({tensor.mutable_data_ptr(), tensor.numel()});
  }
  const auto type = type_of(operation);
  const auto scale = pieces.empty() ? 1.0 : scale_for_nccl(in_place, type);
  auto& mine = own<NcclWork>(work);
  TDDP_INTERNAL(mine.belongs_to(*communicator_), "a Work of another communicator was given to NCCL");
  TDDP_INTERNAL(!mine.under_way, operation.name(), " on a Work whose last operation was not waited for");
  auto numel = std::max(input.numel(), output.numel());
  for (const auto& tensor : in_place.tensors) numel += tensor.numel();
  const gpu::OperationLabel label{operation.name(), numel, options.bucket, timeout_};
  const auto call = [&, &nccl = communicator_->nccl()](gpu::Comm comm, gpu::Stream stream) {
    const auto* const from = operation.input.const_data_ptr();
    auto* const to = operation.output.mutable_data_ptr();
    switch (operation.kind) {
      case Kind::kAllReduce:
        return pieces.empty() ? nccl.all_reduce(from, to, operation.input.numel(), type, gpu::kPlainSum, comm, stream)
                              : gpu::all_reduce_together(nccl, comm, stream, type, {to, operation.input.numel()},
                                                         pieces, scale, size());
      case Kind::kReduce: return nccl.reduce(to, operation.input.numel(), type, operation.root, comm, stream);
      case Kind::kReduceScatter: return nccl.reduce_scatter(from, to, operation.output.numel(), type, comm, stream);
      case Kind::kAllGather: return nccl.all_gather(from, to, bytes_of(operation.input), type, comm, stream);
      default: return nccl.broadcast(to, bytes_of(operation.output), type, operation.root, comm, stream);
    }
  };
  communicator_->start(mine.ticket, label, call, std::move(memory));
  mine.under_way = true;
}

}  // namespace torchddp::transport
