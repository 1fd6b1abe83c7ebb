#include "bindings/bindings.h"

#ifndef TORCHDDP_TORCH_VERSION
#error "TORCHDDP_TORCH_VERSION must name the torch this is built against, e.g. \"2.13.0+cpu\""
#endif
#ifndef TORCHDDP_VERSION
#error "TORCHDDP_VERSION must be the version in pyproject.toml"
#endif

// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables): the macro's own
PYBIND11_MODULE(_C, m) {
  using namespace torchddp::bindings;
  m.doc() = "torchddp's compiled reducer. Use torchddp.DistributedDataParallel; this module has no stable interface.";
  m.attr("torch_version") = TORCHDDP_TORCH_VERSION;
  m.attr("version") = TORCHDDP_VERSION;
#ifdef TORCHDDP_WITH_CUDA
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif
  bind_errors(m);
  bind_plan(m);
  bind_kernels(m);
  bind_timeline(m);
  bind_transport(m);
  bind_cuda(m);
  bind_reducer(m);
}
