# Finds the torch of TORCHDDP_PYTHON without importing it: an imported target `torchddp_torch`, and TORCH_VERSION, TORCH_CUDA,
# TORCH_SITE_DIR, PYTHON_FULL_VERSION, PYTHON_EXT_SUFFIX. find_package(Torch) would insist on its own choice of CUDA
# toolkit (root, architectures, nvrtc, language dialect) even if only the libraries are needed.
set(facts_script ${CMAKE_SOURCE_DIR}/cmake/torch_facts.py)
execute_process(COMMAND ${TORCHDDP_PYTHON} ${facts_script}
  OUTPUT_VARIABLE facts ERROR_VARIABLE facts_error RESULT_VARIABLE facts_rc OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT facts_rc EQUAL 0)
  message(FATAL_ERROR "${facts_error}")
endif()
string(REPLACE "\n" ";" facts "${facts}")
foreach(fact IN LISTS facts)
  string(REGEX MATCH "^([A-Z_]+)=(.*)$" _ "${fact}")
  set(${CMAKE_MATCH_1} "${CMAKE_MATCH_2}")
endforeach()

# Another torch in the same environment requires a rebuild.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${TORCH_DIR}/version.py ${facts_script})

if(NOT EXISTS ${PYTHON_INCLUDE_DIR}/Python.h)
  message(FATAL_ERROR "torchddp: ${PYTHON_INCLUDE_DIR}/Python.h is missing; on Debian and Ubuntu install the headers of "
    "Python ${PYTHON_VERSION} with: apt-get install python${PYTHON_VERSION}-dev")
endif()

set(torch_libraries)
foreach(name c10 torch torch_cpu torch_python)
  find_library(found NAMES ${name} PATHS ${TORCH_DIR}/lib NO_DEFAULT_PATH NO_CACHE)
  if(NOT found)
    message(FATAL_ERROR "torchddp: lib${name} is missing in ${TORCH_DIR}/lib: is the installation of torch ${TORCH_VERSION} complete?")
  endif()
  list(APPEND torch_libraries ${found})
  unset(found)
endforeach()

add_library(torchddp_torch INTERFACE)
target_include_directories(torchddp_torch SYSTEM INTERFACE
  ${TORCH_DIR}/include ${TORCH_DIR}/include/torch/csrc/api/include ${PYTHON_INCLUDE_DIR})
target_link_libraries(torchddp_torch INTERFACE ${torch_libraries})
# As torch.utils.cpp_extension does. Every torch in our range is built with the C++11 ABI of libstdc++.
target_compile_definitions(torchddp_torch INTERFACE
  TORCH_API_INCLUDE_EXTENSION_H TORCH_EXTENSION_NAME=_C _GLIBCXX_USE_CXX11_ABI=1)
