#include "transport/shm/shm_arguments.h"

#include <ATen/Functions.h>

#include <optional>

#include "common/check.h"
#include "transport/sum_types.h"

namespace torchddp::transport {

using Tensors = ShmBackend::Tensors;

namespace {

std::optional<Reduction> find_reduction(at::ScalarType dtype, c10d::ReduceOp::RedOpType op) {
  using kernels::ReduceOp;
  if (dtype == at::kBool) {
    // "Or" and "and" of bytes that are 0 or 1, and stay so.
    switch (op) {
      case c10d::ReduceOp::SUM:
      case c10d::ReduceOp::MAX:
        return Reduction{kernels::DType::kU8, ReduceOp::kMax, false};
      case c10d::ReduceOp::PRODUCT:
      case c10d::ReduceOp::MIN:
        return Reduction{kernels::DType::kU8, ReduceOp::kMin, false};
      default:
        return std::nullopt;
    }
  }
  const auto type = sum_type(dtype);
  if (!type) {
    return std::nullopt;
  }
  switch (op) {
    case c10d::ReduceOp::SUM:
      return Reduction{*type, ReduceOp::kSum, false};
    case c10d::ReduceOp::AVG:
      return Reduction{*type, ReduceOp::kSum, true};
    case c10d::ReduceOp::PRODUCT:
      return Reduction{*type, ReduceOp::kProduct, false};
    case c10d::ReduceOp::MIN:
      return Reduction{*type, ReduceOp::kMin, false};
    case c10d::ReduceOp::MAX:
      return Reduction{*type, ReduceOp::kMax, false};
    default:
      return std::nullopt;
  }
}

const char* op_name(c10d::ReduceOp::RedOpType op) {
  constexpr const char* kNames[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return static_cast<size_t>(op) < std::size(kNames) ? kNames[op] : "an unknown reduction";
}

}  // namespace

bool adds(const c10d::ReduceOp& op) { return op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG; }

Reduction reduction(const char* name, at::ScalarType dtype, const c10d::ReduceOp& op) {
  const auto found = find_reduction(dtype, op.op_);
  TDDP_CHECK(
      found, name, ": the ", ShmBackend::kName, " backend has no ", op_name(op.op_), " of ", dtype,
      ". It has SUM, AVG, PRODUCT, MIN and MAX of floats and of integers up to int64, the same but AVG of bool, and ",
      "SUM and AVG of complex numbers");
  return *found;
}

Tensors as_real(const Tensors& tensors, const c10d::ReduceOp& op) {
  Tensors real;
  for (const auto& tensor : tensors) {
    const bool pairs = tensor.is_complex() && adds(op);
    TDDP_CHECK(!pairs || !tensor.is_conj(), "the ", ShmBackend::kName,
               " backend can't reduce a conjugate view: call resolve_conj() first");
    real.push_back(pairs ? at::view_as_real(tensor) : tensor);
  }
  return real;
}

void divide(const Tensors& tensors, int size) {
  for (const auto& tensor : tensors) {
    if (at::isFloatingType(tensor.scalar_type())) {
      tensor.div_(size);
    } else {
      tensor.div_(size, "trunc");
    }
  }
}

void check_dense_cpu(const char* name, int rank, const Tensors& tensors) {
  for (const auto& tensor : tensors) {
    TDDP_CHECK(tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided, name, " on rank ", rank,
               ": the ", ShmBackend::kName, " backend takes dense CPU tensors, got ",
               tensor.defined() ? c10::str("a ", tensor.layout(), " tensor on ", tensor.device()) : "none");
    TDDP_CHECK(tensor.scalar_type() == tensors.front().scalar_type(), name, " on rank ", rank, ": tensors of ",
               tensors.front().scalar_type(), " and ", tensor.scalar_type(), " in one operation");
  }
}

const at::Tensor& only(const char* name, int rank, const Tensors& tensors) {
  TDDP_CHECK(tensors.size() == 1, name, " on rank ", rank, ": expected one tensor, got ", tensors.size());
  return tensors[0];
}

const Tensors& one_each(const char* name, int rank, int size, const ShmBackend::Lists& lists, const at::Tensor& like) {
  TDDP_CHECK(lists.size() == 1 && lists[0].size() == static_cast<size_t>(size), name, " on rank ", rank,
             ": expected a list of ", size, " tensors, one for each rank, got ",
             lists.size() == 1 ? lists[0].size() : lists.size());
  for (const auto& tensor : lists[0]) {
    TDDP_CHECK(tensor.numel() == like.numel(), name, " on rank ", rank, ": a tensor of ", tensor.numel(),
               " elements in the list, expected ", like.numel(), " as in the single one");
  }
  return lists[0];
}

Tensors split_rows(const char* name, const at::Tensor& tensor, const std::vector<int64_t>& splits, int size) {
  TDDP_CHECK(tensor.dim() > 0, name, ": a tensor without dimensions can't be split");
  const auto rows = tensor.size(0);
  TDDP_CHECK(splits.empty() ? rows % size == 0 : splits.size() == static_cast<size_t>(size), name, ": can't split ",
             rows, " rows between ", size, " ranks",
             splits.empty() ? "" : c10::str(" by ", splits.size(), " split sizes"));
  Tensors parts;
  int64_t begin = 0;
  for (int rank = 0; rank < size; ++rank) {
    const auto count = splits.empty() ? rows / size : splits[static_cast<size_t>(rank)];
    TDDP_CHECK(count >= 0 && begin + count <= rows, name, ": the split sizes are more than the ", rows, " rows");
    parts.push_back(tensor.narrow(0, begin, count));
    begin += count;
  }
  TDDP_CHECK(begin == rows, name, ": the split sizes add up to ", begin, ", the tensor has ", rows, " rows");
  return parts;
}

}  // namespace torchddp::transport
