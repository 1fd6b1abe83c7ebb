// What the backend's collectives may be called with: the checks, and the reduction that is meant.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "kernels/sum.h"
#include "transport/shm/shm_backend.h"

namespace torchddp::transport {

struct Reduction {
  kernels::DType type = kernels::DType::kF32;
  kernels::ReduceOp op = kernels::ReduceOp::kSum;
  bool average = false;
};

bool adds(const c10d::ReduceOp& op);
// Throws for what nobody reduces. `name`: of the operation, for messages.
Reduction reduction(const char* name, at::ScalarType dtype, const c10d::ReduceOp& op);
// Complex numbers are added as pairs of real ones.
ShmBackend::Tensors as_real(const ShmBackend::Tensors& tensors, const c10d::ReduceOp& op);
void divide(const ShmBackend::Tensors& tensors, int size);
void check_dense_cpu(const char* name, int rank, const ShmBackend::Tensors& tensors);
// The tensor of a list that must hold one.
const at::Tensor& only(const char* name, int rank, const ShmBackend::Tensors& tensors);
// The tensors for, or from, each rank: as many as there are ranks, each as large as `like`.
const ShmBackend::Tensors& one_each(const char* name, int rank, int size, const ShmBackend::Lists& lists,
                                    const at::Tensor& like);
// Rows of a tensor, one part for each rank.
ShmBackend::Tensors split_rows(const char* name, const at::Tensor& tensor, const std::vector<int64_t>& splits,
                               int size);

}  // namespace torchddp::transport
