# The extension torchddp._C.
include(cmake/torch.cmake)
message(STATUS "torchddp ${TORCHDDP_VERSION} for torch ${TORCH_VERSION} in ${TORCH_DIR}")

file(GLOB_RECURSE torch_sources CONFIGURE_DEPENDS csrc/*.cpp)
list(REMOVE_ITEM torch_sources ${pure_sources})
if(NOT torch_sources)
  message(FATAL_ERROR "torchddp: no C++ sources below ${CMAKE_SOURCE_DIR}/csrc.")
endif()

if(TORCHDDP_CUDA)
  include(cmake/cuda.cmake) # before the targets, which inherit its language settings
endif()

# Three large units, the bindings, what else includes torch, and the rest (csrc/transport/cuda is small without CUDA), because the compiler mostly reads torch's headers: about 15 s
# of CPU time in each unit. TORCHDDP_UNITY=0 compiles each source by itself, which is faster after a change in one.
set(binding_sources ${torch_sources})
list(FILTER binding_sources INCLUDE REGEX "/csrc/bindings/")
list(REMOVE_ITEM torch_sources ${binding_sources})
set(device_sources ${torch_sources})
list(FILTER device_sources INCLUDE REGEX "/csrc/transport/cuda/")
list(REMOVE_ITEM torch_sources ${device_sources})
add_library(torchddp_bindings OBJECT ${binding_sources})
target_link_libraries(torchddp_bindings PRIVATE torchddp_options torchddp_torch)
target_compile_options(torchddp_bindings PRIVATE -O1) # translates arguments, once per step; -O3 takes 16 s more
add_library(torchddp_engine OBJECT ${torch_sources})
target_link_libraries(torchddp_engine PRIVATE torchddp_options torchddp_torch)
add_library(_C MODULE ${device_sources} ${cuda_sources})
target_link_libraries(_C PRIVATE torchddp_options torchddp_torch torchddp_bindings torchddp_engine)
if(TORCHDDP_CUDA)
  target_link_libraries(_C PRIVATE torchddp_cuda)
  target_link_libraries(torchddp_bindings PRIVATE torchddp_cuda)
  target_link_libraries(torchddp_engine PRIVATE torchddp_cuda)
  set_source_files_properties(${cuda_sources} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endif()
add_library(torchddp_pure OBJECT ${pure_sources})
target_link_libraries(torchddp_pure PRIVATE torchddp_options)
target_link_libraries(_C PRIVATE torchddp_pure)
set_target_properties(_C torchddp_bindings torchddp_engine torchddp_pure PROPERTIES UNITY_BUILD ${TORCHDDP_UNITY} UNITY_BUILD_BATCH_SIZE 0)

# Without -fopenmp, torch's at::parallel_for compiles to a serial loop in an extension. At run time it uses the libgomp that torch
# has already loaded. And we support a range of torch versions: a function deprecated in a new one is often the only choice in
# an old one.
target_compile_options(torchddp_torch INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-fopenmp;-Wno-error=deprecated-declarations>")
target_link_options(torchddp_torch INTERFACE -fopenmp)

# No precompiled header, on purpose: one of the torch headers that we use takes 45 s of CPU time and 560 MB, and each unit still
# reads it for 5 s.

# Shown by `torchddp doctor`. Defined for one file only, so that a new version does not rebuild the others.
set(module_definitions
  "TORCHDDP_VERSION=\"${TORCHDDP_VERSION}\""
  "TORCHDDP_TORCH_VERSION=\"${TORCH_VERSION}\""
  "TORCHDDP_PYTHON_VERSION=\"${PYTHON_FULL_VERSION}\""
  "TORCHDDP_COMPILER=\"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\"")
if(TORCHDDP_CUDA)
  list(JOIN CMAKE_CUDA_ARCHITECTURES " " cuda_archs)
  list(APPEND module_definitions
    "TORCHDDP_CUDA_VERSION=\"${CUDAToolkit_VERSION}\""
    "TORCHDDP_NCCL_VERSION=\"${nccl_version}\""
    "TORCHDDP_CUDA_ARCHS=\"${cuda_archs}\"")
endif()
set_source_files_properties(csrc/bindings/build_info.cpp PROPERTIES COMPILE_DEFINITIONS "${module_definitions}")

set(rpath $ORIGIN/../torch/lib)
if(TORCHDDP_CUDA)
  # The folders of the NVIDIA wheels that torch requires: a single one for all libraries since CUDA 13.
  if(CUDAToolkit_VERSION_MAJOR VERSION_LESS 13)
    list(APPEND rpath $ORIGIN/../nvidia/cuda_runtime/lib)
  else()
    list(APPEND rpath $ORIGIN/../nvidia/cu${CUDAToolkit_VERSION_MAJOR}/lib)
  endif()
  list(APPEND rpath $ORIGIN/../nvidia/nccl/lib)
endif()
set_target_properties(_C PROPERTIES
  PREFIX "" OUTPUT_NAME "${TORCHDDP_OUTPUT_NAME}" SUFFIX ""
  LIBRARY_OUTPUT_DIRECTORY "${TORCHDDP_OUTPUT_DIR}"
  BUILD_RPATH "${rpath}" INSTALL_RPATH "${rpath}" BUILD_WITH_INSTALL_RPATH ON)

# The same module for the tests of tests/simgpu: a simulated GPU in the place of csrc/transport/cuda. Built on demand.
file(GLOB simulated_sources CONFIGURE_DEPENDS tests/simgpu/csrc/*.cpp)
if(NOT simulated_sources OR TORCHDDP_CUDA)
  return() # an archive without tests
endif()
add_library(simulated_gpu MODULE EXCLUDE_FROM_ALL ${simulated_sources})
target_link_libraries(simulated_gpu PRIVATE torchddp_options torchddp_torch torchddp_bindings torchddp_engine torchddp_pure)
target_compile_options(simulated_gpu PRIVATE -O1)
set_target_properties(simulated_gpu PROPERTIES
  UNITY_BUILD ${TORCHDDP_UNITY} UNITY_BUILD_BATCH_SIZE 0 PREFIX "" SUFFIX "${PYTHON_EXT_SUFFIX}"
  LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}" BUILD_RPATH "${rpath}")
