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

add_library(_C MODULE ${torch_sources} ${cuda_sources})
if(TORCHDDP_UNITY)
  # Compile the sources of a folder as one, because the compiler mostly reads torch's headers (csrc/reducer: 15 s of CPU time
  # instead of 123). Sources with their own definitions (module.cpp) are compiled separately.
  set_target_properties(_C PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  foreach(source IN LISTS torch_sources)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${CMAKE_SOURCE_DIR}/csrc OUTPUT_VARIABLE group)
    cmake_path(GET group PARENT_PATH group)
    string(REGEX REPLACE "^reducer/.*" "reducer" group ${group}) # one unit spread over several folders
    string(REPLACE "/" "_" group ${group})
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
  endforeach()
  # The slowest source (31 s of CPU time, 44 with its neighbors): on many cores the whole build would wait for it.
  set_source_files_properties(csrc/bindings/bind_reducer.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endif()
target_link_libraries(_C PRIVATE torchddp_options torchddp_torch)
if(TORCHDDP_CUDA)
  target_link_libraries(_C PRIVATE torchddp_cuda)
endif()
if(pure_sources)
  add_library(torchddp_pure OBJECT ${pure_sources})
  target_link_libraries(torchddp_pure PRIVATE torchddp_options)
  target_link_libraries(_C PRIVATE torchddp_pure)
endif()
# Without -fopenmp, torch's at::parallel_for compiles to a serial loop in an extension. At run time it uses the libgomp
# that torch has already loaded.
target_compile_options(_C PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
target_link_options(_C PRIVATE -fopenmp)

# We support a range of torch versions: a function deprecated in a new one is often the only choice in an old one.
target_compile_options(_C PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-error=deprecated-declarations>)

# No precompiled header, on purpose: our files include only the torch headers that they use (torch/csrc/utils/pybind.h, never
# torch/extension.h). We tried one: total CPU time was the same, and for half a minute nothing else could start.

# Shown by `torchddp doctor`. Defined for one file only, so that a new version does not rebuild the others.
set(module_definitions
  "TORCHDDP_VERSION=\"${TORCHDDP_VERSION}${TORCHDDP_LOCAL_VERSION}\""
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
set_source_files_properties(csrc/bindings/module.cpp PROPERTIES COMPILE_DEFINITIONS "${module_definitions}")

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
  PREFIX "" SUFFIX "${PYTHON_EXT_SUFFIX}"
  LIBRARY_OUTPUT_DIRECTORY "${TORCHDDP_OUTPUT_DIR}"
  BUILD_RPATH "${rpath}" INSTALL_RPATH "${rpath}" BUILD_WITH_INSTALL_RPATH ON)
