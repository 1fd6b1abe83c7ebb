#include "bindings/bindings.h"

#ifndef TORCHDDP_TORCH_VERSION
#error "TORCHDDP_TORCH_VERSION must name the torch this is built against, e.g. \"2.13.0+cpu\""
#endif
#ifndef TORCHDDP_VERSION
#error "TORCHDDP_VERSION must be the version in pyproject.toml"
#endif
#if !defined(TORCHDDP_PYTHON_VERSION) || !defined(TORCHDDP_COMPILER)
#error "TORCHDDP_PYTHON_VERSION and TORCHDDP_COMPILER must say what this is built with"
#endif
#ifndef TORCHDDP_WITH_CUDA
#define TORCHDDP_CUDA_VERSION ""
#define TORCHDDP_NCCL_VERSION ""
#define TORCHDDP_CUDA_ARCHS ""
#endif

namespace {

// What `torchddp doctor` shows; empty where there is no such part.
pybind11::dict build_info() {
  pybind11::dict info;
  info["torch"] = TORCHDDP_TORCH_VERSION;
  info["python"] = TORCHDDP_PYTHON_VERSION;
  info["compiler"] = TORCHDDP_COMPILER;
  info["cuda"] = TORCHDDP_CUDA_VERSION;
  info["nccl"] = TORCHDDP_NCCL_VERSION;
  info["archs"] = TORCHDDP_CUDA_ARCHS;
  return info;
}

}  // namespace

// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables): the macro's own
PYBIND11_MODULE(_C, m) {
  using namespace torchddp::bindings;
  m.doc() = "torchddp's compiled reducer. Use torchddp.DistributedDataParallel; this module has no stable interface.";
  m.attr("torch_version") = TORCHDDP_TORCH_VERSION;
  m.attr("version") = TORCHDDP_VERSION;
  m.attr("build_info") = build_info();
#ifdef TORCHDDP_WITH_CUDA
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif
  bind_errors(m);
  bind_plan(m);
  bind_kernels(m);
  bind_transport(m);
  bind_buffers(m);
  bind_watch(m);
  bind_cuda(m);
  bind_reducer(m);
}
