// Between hosts: the ranks that own the same shard on each of them, and a process group of those.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <deque>

#include "shm/engine.h"

namespace torchddp::transport {

class C10dOuterLink final : public shm::OuterLink {
 public:
  explicit C10dOuterLink(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {}
  void start(void* data, kernels::SumType type, int64_t numel, std::optional<kernels::SumType> wire) override;
  bool finish_oldest() override;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  struct Running {
    c10::intrusive_ptr<c10d::Work> work;
    at::Tensor data;
    at::Tensor gathered;  // what all hosts sent, a row each, if it is not summed by the process group itself
  };
  std::deque<Running> running_;
};

}  // namespace torchddp::transport
