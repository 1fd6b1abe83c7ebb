#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bucket/tensor_checks.h"
#include "kernels/pack.h"

namespace torchddp::bindings {

void bind_kernels(py::module_& m) {
  m.def("cpu_capability", &kernels::cpu_capability,
        "The instruction set the pack kernels use: 'avx512', 'avx2' or 'generic'.");
  m.def("hash_tensor", &bucket::hash_tensor, py::arg("tensor"), NoGil(),
        "A 64-bit hash of the bits of a contiguous CPU tensor.");
}

}  // namespace torchddp::bindings
