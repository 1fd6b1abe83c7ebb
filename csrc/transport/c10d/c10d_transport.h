// The portable transport: any torch.distributed process group (gloo, NCCL, MPI, UCC, or one written in Python).
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "transport/transport.h"

namespace torchddp::transport {

class C10dTransport final : public Transport {
 public:
  explicit C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group);

  int rank() const override { return group_->getRank(); }
  int size() const override { return group_->getSize(); }
  std::unique_ptr<Work> make_work() override;
  // gloo's operations continue in the background until their own time limit; those of other backends are aborted if possible.
  void interrupt(const std::string& reason) override {
    Transport::interrupt(reason);
    try {
      group_->abort();
    } catch (const std::exception&) {
      // The backend can't abort; its operations end by their own time limit.
    }
  }

 private:
  void launch(const Collective& operation, Work& work) override;
  // The tensors in place are scaled here and sent one after the other.
  void all_reduce_each(const Collective& operation, Work& work);
  bool sums_itself(const Collective& operation) const;
  void exchange_and_sum(const Collective& operation, Work& work);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  bool is_gloo_ = false;
};

}  // namespace torchddp::transport
