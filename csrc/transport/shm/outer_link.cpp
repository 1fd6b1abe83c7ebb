// The link between hosts: a process group of the ranks that own the same shard on each host.
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <deque>

#include "common/errors.h"
#include "transport/c10d/group_work.h"
#include "transport/shm/shm_channel.h"
#include "transport/sum_types.h"

namespace torchddp::transport {
namespace {

class C10dOuterLink final : public shm::OuterLink {
 public:
  C10dOuterLink(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<shm::Segment> segment)
      : group_(std::move(group)), segment_(std::move(segment)) {}

  void start(void* data, kernels::DType type, int64_t numel, std::optional<kernels::DType> sent) override {
    const c10::NoGradGuard no_grad;
    const WithoutPythonObjects without_python_objects;
    Transfer running;
    running.data =
        at::from_blob(data, {numel}, [segment = segment_](void*) {}, at::TensorOptions().dtype(scalar_type(type)));
    try {
      if (sent) {
        // Process groups sum 16-bit floats in 16 bits. Here each host gets the others' addends and sums them in fp32.
        auto mine = running.data.to(scalar_type(*sent));
        running.gathered = at::empty({group_->getSize() * numel}, mine.options());
        running.work = all_gather_flat(*group_, running.gathered, mine);
      } else {
        std::vector<at::Tensor> tensors{running.data};
        running.work = group_->allreduce(tensors, c10d::AllreduceOptions());
      }
    } catch (const std::exception& error) {
      throw TransportError(with_advice(reason_of(error)));
    }
    running_.push_back(std::move(running));
  }

  bool finish_oldest() override {
    auto& oldest = running_.front();
    if (!oldest.work->isCompleted()) return false;
    bool ok = false;
    try {
      ok = oldest.work->wait();
    } catch (const std::exception& error) {
      throw TransportError(with_advice(reason_of(error)));
    }
    if (!ok) throw TransportError(with_advice("the process group reported that the operation failed."));
    if (oldest.gathered.defined()) {
      const c10::NoGradGuard no_grad;
      at::sum_out(oldest.data, oldest.gathered.view({group_->getSize(), -1}), at::IntArrayRef{0}, /*keepdim=*/false,
                  oldest.data.scalar_type());
    }
    running_.pop_front();
    return true;
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<shm::Segment> segment_;
  struct Transfer {
    c10::intrusive_ptr<c10d::Work> work;
    at::Tensor data;
    at::Tensor gathered;  // what all hosts sent, one row each, unless the process group sums it
  };
  std::deque<Transfer> running_;
};

}  // namespace

std::unique_ptr<shm::OuterLink> make_outer_link(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                std::shared_ptr<shm::Segment> segment) {
  return std::make_unique<C10dOuterLink>(std::move(group), std::move(segment));
}

}  // namespace torchddp::transport
