# C++ tests of the torch-free folders. TORCHDDP_SANITIZE=address,undefined builds all of them with these sanitizers;
# TORCHDDP_SANITIZE=thread builds those in which threads share memory.
enable_testing()
file(GLOB test_sources CONFIGURE_DEPENDS tests/cpp/*.cpp)
if(NOT test_sources)
  message(FATAL_ERROR "torchddp: no C++ tests below ${CMAKE_SOURCE_DIR}/tests/cpp.")
endif()

if(TORCHDDP_SANITIZE STREQUAL thread)
  list(FILTER test_sources INCLUDE REGEX "/(main|test_(shm|gpu)_[^/]*)\\.cpp$")
  list(FILTER test_sources EXCLUDE REGEX "/test_shm_mesh_processes\\.cpp$") # it forks, which ThreadSanitizer does not support
endif()

add_executable(torchddp_cpp_tests ${test_sources} ${pure_sources})
target_include_directories(torchddp_cpp_tests PRIVATE tests/cpp)
target_link_libraries(torchddp_cpp_tests PRIVATE torchddp_options)
# The code under test is compiled as shipped, except for the sanitizers. The tests are compiled for the shortest total of compile
# time and run time: with sanitizer checks, the device code that runs on the host takes longer to optimize than to run.
if(TORCHDDP_SANITIZE)
  set(sanitizers -fsanitize=${TORCHDDP_SANITIZE} -fno-sanitize-recover=all)
  target_compile_options(torchddp_cpp_tests PRIVATE ${sanitizers} -O1 -g1 -fno-omit-frame-pointer)
  target_link_options(torchddp_cpp_tests PRIVATE ${sanitizers})
endif()
set_target_properties(torchddp_cpp_tests PROPERTIES UNITY_BUILD ${TORCHDDP_UNITY} UNITY_BUILD_BATCH_SIZE 0)
set_source_files_properties(${test_sources} PROPERTIES COMPILE_OPTIONS -O1 SKIP_UNITY_BUILD_INCLUSION ON)
if(TORCHDDP_SANITIZE)
  set_source_files_properties(${CMAKE_SOURCE_DIR}/tests/cpp/test_pack_device.cpp PROPERTIES COMPILE_OPTIONS -O0)
endif()

# One process per file, so that ctest runs files in parallel.
list(FILTER test_sources EXCLUDE REGEX "/main\\.cpp$")
foreach(source IN LISTS test_sources)
  cmake_path(GET source STEM name)
  add_test(NAME ${name} COMMAND torchddp_cpp_tests /${name}.cpp)
  set_tests_properties(${name} PROPERTIES TIMEOUT 900) # on a busy machine; a test that takes this long has hung
endforeach()
set_tests_properties(test_shm_engine test_shm_many_ranks test_shm_interrupt PROPERTIES COST 1) # start the longest first

# The search of the shared-memory protocol (docs/shm_model.md). In its build, tests/cpp/model/shm comes before csrc/shm, so the
# sources of the protocol are compiled against the model of memory; and the compiler shows it every access to ordinary memory, by
# calls that are otherwise meant for ThreadSanitizer.
if(NOT TORCHDDP_SANITIZE)
  set(searched board chunks engine failure fd inputs mesh operation processors pull running)
  list(TRANSFORM searched REPLACE "(.+)" "csrc/shm/\\1.cpp")
  file(GLOB model_sources CONFIGURE_DEPENDS tests/cpp/model/*.cpp)
  add_library(torchddp_searched OBJECT ${searched})
  add_executable(torchddp_shm_model ${model_sources})
  foreach(target torchddp_searched torchddp_shm_model)
    target_include_directories(${target} BEFORE PRIVATE tests/cpp/model tests/cpp)
    target_link_libraries(${target} PRIVATE torchddp_options)
    target_compile_options(${target} PRIVATE -O2)
  endforeach()
  target_compile_options(torchddp_searched PRIVATE -fsanitize=thread)
  target_link_libraries(torchddp_shm_model PRIVATE torchddp_searched)
  target_link_options(torchddp_shm_model PRIVATE -Wl,--wrap=memcpy)
  # `make test-thorough` runs those of the configuration `thorough`.
  add_test(NAME shm_model COMMAND torchddp_shm_model 400)
  add_test(NAME shm_model_can_fail COMMAND torchddp_shm_model weaken 400 post.number)
  add_test(NAME shm_model_deep COMMAND torchddp_shm_model 10000 CONFIGURATIONS thorough)
  add_test(NAME shm_model_orders CONFIGURATIONS thorough
    COMMAND torchddp_shm_model weaken 3000 "" ${CMAKE_SOURCE_DIR}/docs/shm_model.md)
  set_tests_properties(shm_model_deep shm_model_orders PROPERTIES LABELS thorough TIMEOUT 7200)
endif()
