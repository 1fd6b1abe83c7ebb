# CUDA parts of the extension: `cuda_sources` and an interface target `torchddp_cuda`. Kernels (.cu) include no torch header and
# are C++17, so that they compile in seconds.
if(NOT TORCH_CUDA)
  message(FATAL_ERROR "torchddp: TORCHDDP_CUDA is on, but torch ${TORCH_VERSION} of '${TORCHDDP_PYTHON}' is not a CUDA build. "
    "Install one (pip install 'torch===2.13.0') or build without TORCHDDP_CUDA.")
endif()

check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "torchddp: TORCHDDP_CUDA is on, but no nvcc was found. Install the CUDA ${TORCH_CUDA} toolkit, or set "
    "CUDACXX=/path/to/nvcc.")
endif()
# Set before the language is enabled; otherwise CMake picks an architecture itself.
set(chosen_archs ${CMAKE_CUDA_ARCHITECTURES}) # e.g. -DCMAKE_CUDA_ARCHITECTURES=90-real for one machine
set(CMAKE_CUDA_ARCHITECTURES 75-real 80-real 90-real)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
# The last one also as PTX, for later GPUs. nvcc supports Blackwell since 12.8.
if(chosen_archs)
  set(CMAKE_CUDA_ARCHITECTURES ${chosen_archs})
elseif(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  set(CMAKE_CUDA_ARCHITECTURES 75-real 80-real 90)
else()
  set(CMAKE_CUDA_ARCHITECTURES 75-real 80-real 90-real 100)
endif()
include(cmake/cuda_version.cmake)
torchddp_check_cuda_version("${CUDAToolkit_VERSION}" "${TORCH_CUDA}" "${TORCH_VERSION}")

set(torch_cuda_libraries)
foreach(name c10_cuda torch_cuda)
  find_library(found NAMES ${name} PATHS ${TORCH_DIR}/lib NO_DEFAULT_PATH NO_CACHE REQUIRED)
  list(APPEND torch_cuda_libraries ${found})
  unset(found)
endforeach()
# torch's wheels bring NCCL, as a versioned library only; the system's NCCL is the second choice.
find_path(nccl_include nccl.h HINTS ${TORCH_SITE_DIR}/nvidia/nccl/include NO_CACHE)
find_library(nccl_library NAMES nccl libnccl.so.2 HINTS ${TORCH_SITE_DIR}/nvidia/nccl/lib NO_CACHE)
if(NOT nccl_include OR NOT nccl_library)
  message(FATAL_ERROR "torchddp: TORCHDDP_CUDA is on, but NCCL was not found (nccl.h: ${nccl_include}, library: ${nccl_library}). "
    "torch's CUDA wheels bring it as nvidia-nccl-cu${CUDAToolkit_VERSION_MAJOR}.")
endif()

file(STRINGS ${nccl_include}/nccl.h nccl_numbers REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) [0-9]+$")
list(TRANSFORM nccl_numbers REPLACE "^.* " "")
list(JOIN nccl_numbers "." nccl_version)

file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS csrc/*.cu)
add_library(torchddp_cuda INTERFACE)
target_compile_definitions(torchddp_cuda INTERFACE TORCHDDP_WITH_CUDA)
# Like -ffp-contract=off on the CPU: products are rounded before they are added.
target_compile_options(torchddp_cuda INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false>)
target_include_directories(torchddp_cuda SYSTEM INTERFACE ${nccl_include} ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(torchddp_cuda INTERFACE ${torch_cuda_libraries} ${nccl_library} CUDA::cudart)
message(STATUS "CUDA ${CUDAToolkit_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}, NCCL ${nccl_version} (${nccl_library})")
