// Declared in bindings.h, which takes 10 s to read.
#ifdef TORCHDDP_WITH_CUDA
#define TORCHDDP_IS_CUDA true
#else
#define TORCHDDP_IS_CUDA false
#define TORCHDDP_CUDA_VERSION ""
#define TORCHDDP_NCCL_VERSION ""
#define TORCHDDP_CUDA_ARCHS ""
#endif

namespace torchddp::bindings {

extern const char* const kVersion = TORCHDDP_VERSION;
extern const bool kWithCuda = TORCHDDP_IS_CUDA;
extern const char* const kBuildInfo = "torchddp build info\nversion=" TORCHDDP_VERSION  //
                                      "\ntorch=" TORCHDDP_TORCH_VERSION                 //
                                      "\npython=" TORCHDDP_PYTHON_VERSION               //
                                      "\ncompiler=" TORCHDDP_COMPILER                   //
                                      "\ncuda=" TORCHDDP_CUDA_VERSION                   //
                                      "\nnccl=" TORCHDDP_NCCL_VERSION                   //
                                      "\narchs=" TORCHDDP_CUDA_ARCHS "\n";

}  // namespace torchddp::bindings
