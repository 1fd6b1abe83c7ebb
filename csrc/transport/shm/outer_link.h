// Between hosts: the ranks that own the same shard on each of them, and a process group of those.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <deque>
#include <memory>

#include "shm/engine.h"
#include "shm/segment.h"

namespace torchddp::transport {

class C10dOuterLink final : public shm::OuterLink {
 public:
  // `segment`: where the data lies. The process group may still write there when an operation has failed, and the transport is gone.
  C10dOuterLink(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<shm::Segment> segment)
      : group_(std::move(group)), segment_(std::move(segment)) {}
  void start(void* data, kernels::DType type, int64_t numel, std::optional<kernels::DType> wire) override;
  bool finish_oldest() override;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<shm::Segment> segment_;
  struct Running {
    c10::intrusive_ptr<c10d::Work> work;
    at::Tensor data;
    at::Tensor gathered;  // what all hosts sent, a row each, if it is not summed by the process group itself
  };
  std::deque<Running> running_;
};

}  // namespace torchddp::transport
