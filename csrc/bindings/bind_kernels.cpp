#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bucket/device_pack.h"
#include "bucket/kernel_type.h"
#include "bucket/tensor_checks.h"
#include "common/check.h"
#include "kernels/pack.h"
#include "kernels/stats.h"

namespace torchddp::bindings {
namespace {

std::pair<double, int64_t> measure(const at::Tensor& tensor) {
  TDDP_CHECK(tensor.is_cpu() && tensor.is_contiguous(), "measure wants a contiguous CPU tensor, got sizes ",
             tensor.sizes(), " with strides ", tensor.strides(), " on ", tensor.device());
  const auto type = bucket::kernel_type(tensor.scalar_type());
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
  m.def("hash_tensors", &bucket::hash_tensors, py::arg("tensors"), py::arg("by_operators") = false, NoGil(),
        "A 64-bit hash of each tensor's bits, in logical order.");
  m.def("pack_on_device", &bucket::pack_on_device, py::arg("flat"), py::arg("tensors"), py::arg("offsets"),
        py::arg("scale") = 1.0, py::arg("stats") = py::none(), NoGil(),
        "flat[offset : offset + numel] = tensor * scale for all tensors, in one launch on the current CUDA stream.");
  m.def("unpack_on_device", &bucket::unpack_on_device, py::arg("flat"), py::arg("tensors"), py::arg("offsets"),
        py::arg("scale") = 1.0, py::arg("stats") = py::none(), NoGil(),
        "tensor = flat[offset : offset + numel] * scale for all tensors, in one launch on the current CUDA stream.");
}

}  // namespace torchddp::bindings
