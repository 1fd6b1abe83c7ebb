# Stops the build if code compiled by nvcc of CUDA `nvcc` can't run with a torch built with CUDA `torch_cuda`. nvcc's code calls
# functions of its own version's runtime library, but torch brings that of its version: a newer nvcc leaves symbols undefined,
# which shows only at import.
function(torchddp_check_cuda_version nvcc torch_cuda torch_version)
  string(REGEX MATCH "^[0-9]+" nvcc_major "${nvcc}")
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" nvcc_minor "${nvcc}")
  string(REGEX MATCH "^[0-9]+" torch_major "${torch_cuda}")
  if(NOT nvcc_major EQUAL torch_major OR nvcc_minor VERSION_GREATER torch_cuda)
    message(FATAL_ERROR "torchddp: nvcc is CUDA ${nvcc}, torch ${torch_version} was built with CUDA ${torch_cuda}. nvcc must be of "
      "the same major version and not newer. Install the CUDA ${torch_cuda} toolkit and set CUDACXX=/path/to/nvcc, or install a torch "
      "that was built with CUDA ${nvcc_minor}.")
  endif()
endfunction()
