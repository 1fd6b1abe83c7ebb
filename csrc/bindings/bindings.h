// One function per area. Bindings translate; they make no decisions.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "transport/traffic.h"

namespace torchddp::bindings {

// What this was built for, as lines `name=value`; a part that does not apply is empty. torchddp/_import_check.py also searches
// the file for it when it does not load.
extern const char* const kBuildInfo;
extern const char* const kVersion;
extern const bool kWithCuda;

void bind_errors(py::module_& m);
void bind_process(py::module_& m);
void bind_plan(py::module_& m);
void bind_kernels(py::module_& m);
void bind_transport(py::module_& m);
void bind_buffers(py::module_& m);
void bind_cuda(py::module_& m);
void bind_reducer(py::module_& m);

// Route name -> (bytes given, bytes on the wire), for routes that carried anything.
py::dict to_dict(const transport::Traffic& traffic);

// For calls that may wait or run autograd, during which other Python threads and Python hooks need the GIL.
using NoGil = py::call_guard<py::gil_scoped_release>;

// The same object, released without the GIL. Anything that holds a process group needs this: its destructor waits for threads
// that may be about to take the GIL (torch binds its own classes this way).
template <typename T>
std::shared_ptr<T> no_gil(std::shared_ptr<T> owner) {
  auto* object = owner.get();
  return std::shared_ptr<T>(object, [owner = std::move(owner)](T*) mutable {
    if (PyGILState_Check() != 0) {
      const py::gil_scoped_release release;
      owner.reset();
    } else {
      owner.reset();
    }
  });
}

}  // namespace torchddp::bindings
