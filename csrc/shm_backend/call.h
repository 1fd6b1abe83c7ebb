// One call of a collective of the backend.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <memory>
#include <string>
#include <vector>

#include "common/check.h"
#include "shm_backend/work.h"

namespace torchddp::shm_backend {

// Checks the arguments of a call, and turns collectives of the engine into its operations. `size`: of the group.
class ShmCall {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;

  ShmCall(ShmOperations& operations, int size, Description description);

  std::string where() const { return description.where(); }

  void check_dense_cpu(const Tensors& tensors) const;
  // The tensor of a list that must hold exactly one.
  const at::Tensor& only(const Tensors& tensors) const {
    TDDP_CHECK(tensors.size() == 1, where(), ": expected one tensor, got ", tensors.size());
    return tensors[0];
  }
  // The tensors for or from each rank: one per rank, each of the size of `like`.
  const Tensors& one_each(const Lists& lists, const at::Tensor& like) const;
  // The tensors of a rank that is not the root: must be none.
  Tensors none(const char* what, const Lists& lists) const {
    TDDP_CHECK(lists.empty() || lists[0].empty(), where(), ": ", what, " on a rank that is not the root");
    return {};
  }
  void check_pairs(const Tensors& outputs, const Tensors& inputs) const {
    TDDP_CHECK(outputs.size() == inputs.size(), where(), ": ", outputs.size(), " outputs for ", inputs.size(),
               " inputs");
  }
  int root(int64_t root) const {
    TDDP_CHECK(root >= 0 && root < size_, where(), ": root ", root, " is not in [0, ", size_, ")");
    return static_cast<int>(root);
  }
  void check_reduce_scatter(const at::Tensor& output, const Tensors& inputs) const;
  // Whether the engine reduces such tensors.
  static bool can_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op);
  // Rows of a tensor, one part for each rank.
  Tensors split_rows(const at::Tensor& tensor, const std::vector<int64_t>& splits) const;

  // Each adds an operation of checked tensors, which the engine can reduce. `keep`: this rank wants the result.
  void all_reduce(const Tensors& tensors, const c10d::ReduceOp& op, bool keep = true, int root = 0);
  void reduce_scatter(const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op);
  void all_gather(const Tensors& outputs, const at::Tensor& input);
  void broadcast(const Tensors& tensors, int root);

  Description description;
  std::vector<ShmPart> parts;

 private:
  shm::Operation reducing(shm::OpKind kind, const Tensors& tensors, const c10d::ReduceOp& op, int root) const;
  void sum_for_itself(ShmPart& part, const Tensors& tensors);
  void sum_together(ShmPart& part, const Tensors& tensors, bool keep);
  bool goes_in_pieces(const shm::Operation& whole, const Tensors& tensors) const;
  ShmPart in_pieces(ShmPart part, const Tensors& tensors, const c10d::ReduceOp& op) const;
  at::Tensor bring(ShmPart& part, const Tensors& tensors, bool in_place = true);
  void take_result(ShmPart& part, const Tensors& tensors) const;

  ShmOperations& operations_;
  const std::shared_ptr<ShmTransport> transport_;
  const int rank_, size_;
};

}  // namespace torchddp::shm_backend
