#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bucket/tensor_checks.h"
#include "common/check.h"
#include "kernels/pack.h"
#include "kernels/stats.h"
#include "transport/sum_types.h"

namespace torchddp::bindings {
namespace {

std::pair<double, int64_t> measure(const at::Tensor& tensor) {
  TDDP_CHECK(tensor.is_cpu() && tensor.is_contiguous(), "measure wants a contiguous CPU tensor, got sizes ",
             tensor.sizes(), " with strides ", tensor.strides(), " on ", tensor.device());
  const auto type = transport::kernel_type(tensor.scalar_type());
  TDDP_CHECK(kernels::is_float(type.dtype), "measure wants floating point or complex elements, got ",
             tensor.scalar_type());
  const auto stats = kernels::measure(tensor.const_data_ptr(), type.dtype, tensor.numel() * type.words);
  return {stats.sum_squares, stats.non_finite};
}

}  // namespace

void bind_kernels(py::module_& m) {
  m.def("cpu_capability", &kernels::cpu_capability,
        "The instruction set the pack kernels use: 'avx512', 'avx2' or 'generic'.");
  m.def("measure", &measure, py::arg("tensor"), NoGil(),
        "(sum of squares, number of infinities and NaNs) of a CPU tensor; a complex number counts as two.");
  m.def("hash_tensor", &bucket::hash_tensor, py::arg("tensor"), NoGil(),
        "A 64-bit hash of the bits of a contiguous CPU tensor.");
}

}  // namespace torchddp::bindings
