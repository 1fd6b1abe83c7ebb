// The portable transport: any torch.distributed process group (gloo, NCCL, MPI, UCC, or one written in Python).
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "transport/transport.h"

namespace torchddp::transport {

class C10dTransport final : public Transport {
 public:
  explicit C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group);

  std::string name() const override { return "c10d"; }
  int rank() const override { return group_->getRank(); }
  int size() const override { return group_->getSize(); }
  at::Tensor allocate(int64_t numel, at::ScalarType dtype, at::Device device) override;
  std::unique_ptr<Work> make_work() override;
  bool reaches_any_memory() const override { return true; }
  bool reaches(const at::Tensor&) const override { return true; }
  bool scales(at::ScalarType) const override { return false; }

  using Transport::all_reduce;
  void all_reduce(const at::Tensor& tensor, Work& work, const SumOptions& options) override;
  using Transport::reduce;
  void reduce(const at::Tensor& tensor, int root, Work& work, const SumOptions& options) override;
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, Work& work) override;
  void all_gather(const at::Tensor& output, const at::Tensor& input, Work& work) override;
  void broadcast(const at::Tensor& tensor, int root, Work& work) override;
  void barrier(Work& work) override;
  // gloo's operations go on without us, until their own time limit; those of other backends are aborted, where they can.
  void interrupt(const std::string& reason) override;

 private:
  bool sums_itself(const at::Tensor& tensor) const;
  void start_reduce(const at::Tensor& tensor, int root, Work& work);
  void start_reduce_scatter(const at::Tensor& output, const at::Tensor& input, Work& work);
  void exchange_and_sum(const char* operation, const at::Tensor& output, const at::Tensor& input,
                        std::vector<int64_t> out_splits, std::vector<int64_t> in_splits, Work& work);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  bool is_gloo_ = false;
};

}  // namespace torchddp::transport
