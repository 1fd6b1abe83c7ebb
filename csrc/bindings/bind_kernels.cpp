#include "bindings/bindings.h"
#include "kernels/pack.h"

namespace torchddp::bindings {

void bind_kernels(py::module_& m) {
  m.def("cpu_capability", &kernels::cpu_capability,
        "The instruction set the pack kernels use: 'avx512', 'avx2' or 'generic'.");
}

}  // namespace torchddp::bindings
