#include "bindings/bindings.h"

#ifndef TORCHDDP_WITH_CUDA
#define TORCHDDP_CUDA_VERSION ""
#define TORCHDDP_NCCL_VERSION ""
#define TORCHDDP_CUDA_ARCHS ""
#endif

namespace {

// What this was built for; a part that does not apply is empty. As text, because torchddp/_import_check.py also searches the
// file for it when it does not load.
[[gnu::used]] constexpr char kBuildInfo[] =
    "torchddp build info"
    "\nversion=" TORCHDDP_VERSION        //
    "\ntorch=" TORCHDDP_TORCH_VERSION    //
    "\npython=" TORCHDDP_PYTHON_VERSION  //
    "\ncompiler=" TORCHDDP_COMPILER      //
    "\ncuda=" TORCHDDP_CUDA_VERSION      //
    "\nnccl=" TORCHDDP_NCCL_VERSION      //
    "\narchs=" TORCHDDP_CUDA_ARCHS "\n";

}  // namespace

// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables): the macro's own
PYBIND11_MODULE(_C, m) {
  using namespace torchddp::bindings;
  m.doc() = "torchddp's compiled reducer. Use torchddp.DistributedDataParallel; this module has no stable interface.";
  m.attr("version") = TORCHDDP_VERSION;
  m.attr("build_info") = kBuildInfo;
#ifdef TORCHDDP_WITH_CUDA
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif
  bind_errors(m);
  bind_stacks(m);
  bind_plan(m);
  bind_kernels(m);
  bind_transport(m);
  bind_buffers(m);
  bind_cuda(m);
  bind_reducer(m);
}
