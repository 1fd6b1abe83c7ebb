# Stops the build if what nvcc of CUDA `nvcc` compiles does not run with a torch that was built with CUDA `torch_cuda`. nvcc calls
# functions of its own version's runtime library, and torch's has those of torch's version: a newer nvcc leaves symbols undefined,
# which shows at import only.
function(torchddp_check_cuda_version nvcc torch_cuda torch_version)
  string(REGEX MATCH "^[0-9]+" nvcc_major "${nvcc}")
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" nvcc_minor "${nvcc}")
  string(REGEX MATCH "^[0-9]+" torch_major "${torch_cuda}")
  if(NOT nvcc_major EQUAL torch_major OR nvcc_minor VERSION_GREATER torch_cuda)
    message(FATAL_ERROR "torchddp: nvcc is CUDA ${nvcc}, torch ${torch_version} was built with CUDA ${torch_cuda}. nvcc must be of "
      "the same major version and not newer. Install the CUDA ${torch_cuda} toolkit and name it, CUDACXX=/path/to/nvcc, or a torch "
      "that was built with CUDA ${nvcc_minor}.")
  endif()
endfunction()
