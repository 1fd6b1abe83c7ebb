#include "gpu/nccl.h"

namespace torchddp::gpu {
namespace {

// "2.29.7" of 22907.
std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

std::string version_problem(int running, int built) {
  // The communicator's config struct grows with each minor version, and an older library refuses a newer one.
  if (running / 10000 == built / 10000 && running / 100 >= built / 100) {
    return "";
  }
  return "torchddp was built with NCCL " + version_text(built) + ", but NCCL " + version_text(running) +
         " is loaded: it must be of the same major version and not older. Install the nvidia-nccl package that this "
         "torch asks for, or check LD_LIBRARY_PATH and LD_PRELOAD";
}

}  // namespace torchddp::gpu
