// One function per area: they translate, never decide.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace torchddp::bindings {

void bind_errors(py::module_& m);
void bind_plan(py::module_& m);
void bind_kernels(py::module_& m);
void bind_timeline(py::module_& m);
void bind_transport(py::module_& m);
void bind_reducer(py::module_& m);

// For calls that may wait, or that run autograd: other Python threads, and hooks written in Python, need the GIL meanwhile.
using NoGil = py::call_guard<py::gil_scoped_release>;

}  // namespace torchddp::bindings
