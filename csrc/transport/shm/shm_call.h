// One call of a collective of the backend.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <memory>
#include <vector>

#include "transport/shm/shm_work.h"

namespace torchddp::transport {

// Checks the arguments of a collective and turns it into engine operations. `rank` and `size` are the group's.
class ShmCall {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;

  ShmCall(ShmOperations& operations, int rank, int size, ShmC10dWork::Description description);

  // The collective's name, and the name with the rank, for messages.
  const char* name() const;
  std::string where() const;

  void check_dense_cpu(const Tensors& tensors) const;
  // The tensor of a list that must hold exactly one.
  const at::Tensor& only(const Tensors& tensors) const;
  // The tensors for or from each rank: one per rank, each of the size of `like`.
  const Tensors& one_each(const Lists& lists, const at::Tensor& like) const;
  // The tensors of a rank that is not the root: must be none.
  Tensors none(const char* what, const Lists& lists) const;
  void check_pairs(const Tensors& outputs, const Tensors& inputs) const;
  int root(int64_t root) const;
  // Rows of a tensor, one part for each rank.
  Tensors split_rows(const at::Tensor& tensor, const std::vector<int64_t>& splits) const;

  // Each adds an operation. Tensors are checked here, except broadcast's and the outputs of scatter. `keep`: this rank wants
  // the result.
  void all_reduce(const Tensors& tensors, const c10d::ReduceOp& op, bool keep = true, int root = 0);
  void reduce_scatter(const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op);
  void all_gather(const Tensors& outputs, const at::Tensor& input);
  void broadcast(const Tensors& tensors, int root);
  // `inputs`: on the root.
  void scatter(const Tensors& outputs, const Tensors& inputs, int root);
  // `inputs`: for each rank; `outputs`: from each rank, or nothing at all.
  void all_to_all(const Tensors& outputs, const Tensors& inputs, int root = 0);

  ShmC10dWork::Description description;
  std::vector<ShmPart> parts;

 private:
  Tensors as_real(const Tensors& tensors, const c10d::ReduceOp& op) const;
  shm::Operation reducing(shm::OpKind kind, const Tensors& tensors, const c10d::ReduceOp& op, int root) const;
  void sum_for_itself(ShmPart& part, const Tensors& tensors);
  void sum_together(ShmPart& part, const Tensors& tensors, bool keep);
  bool goes_in_pieces(const shm::Operation& whole, const Tensors& tensors) const;
  ShmPart in_pieces(ShmPart part, const Tensors& tensors, const c10d::ReduceOp& op) const;
  template <typename Take>
  void or_abort(Take&& take) const;
  at::Tensor bring(ShmPart& part, const Tensors& tensors, int64_t lead_bytes = 0, bool in_place = true);
  void take_result(ShmPart& part, const Tensors& tensors) const;

  ShmOperations& operations_;
  const std::shared_ptr<ShmTransport> transport_;
  const int rank_, size_;
};

}  // namespace torchddp::transport
