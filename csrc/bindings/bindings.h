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

// torchddp.InternalError and friends for errors that leave through pybind11 rather than through autograd.
using NoGil = py::call_guard<py::gil_scoped_release>;

}  // namespace torchddp::bindings
