#include "bindings/bindings.h"

// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables): the macro's own
PYBIND11_MODULE(_C, m) {
  using namespace torchddp::bindings;
  m.doc() = "torchddp's compiled reducer. Use torchddp.DistributedDataParallel; this module has no stable interface.";
  m.attr("version") = kVersion;
  m.attr("build_info") = kBuildInfo;
  m.attr("with_cuda") = kWithCuda;
  bind_errors(m);
  bind_process(m);
  bind_plan(m);
  bind_kernels(m);
  bind_transport(m);
  bind_buffers(m);
  bind_cuda(m);
  bind_reducer(m);
}
