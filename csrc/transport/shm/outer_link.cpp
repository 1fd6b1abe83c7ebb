#include "transport/shm/outer_link.h"

#include <ATen/ops/from_blob.h>

#include "common/errors.h"
#include "transport/shm/sum_types.h"

namespace torchddp::transport {

void C10dOuterLink::start(void* data, kernels::SumType type, int64_t numel) {
  std::vector<at::Tensor> tensors{at::from_blob(data, {numel}, at::TensorOptions().dtype(scalar_type(type)))};
  try {
    running_.push_back(group_->allreduce(tensors, c10d::AllreduceOptions()));
  } catch (const std::exception& error) {
    throw TransportError(error.what());
  }
}

bool C10dOuterLink::finish_oldest() {
  auto& oldest = *running_.front();
  if (!oldest.isCompleted()) {
    return false;
  }
  bool ok = false;
  try {
    ok = oldest.wait();
  } catch (const std::exception& error) {
    throw TransportError(error.what());
  }
  if (!ok) {
    throw TransportError("the process group reported that the operation failed");
  }
  running_.pop_front();
  return true;
}

}  // namespace torchddp::transport
