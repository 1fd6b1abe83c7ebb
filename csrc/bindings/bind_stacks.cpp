#include <Python.h>
#include <c10/util/ScopeExit.h>
#include <frameobject.h>

#include "bindings/bindings.h"

namespace torchddp::bindings {
namespace {

// By thread, innermost frame first.
py::dict stacks(size_t limit) {
  const auto current_frames = py::module_::import("sys").attr("_current_frames");
  // Python 3.11 creates a frame object when someone asks for it, and creating one may collect garbage. A finalizer that runs
  // then may release the GIL, so that the thread that is looked at returns from the function whose frame object is being
  // created: it refers to freed memory afterwards. `sys._current_frames` and `frame.f_back` crash in this way, rarely, so here
  // they collect none.
  const bool collects = PyGC_Disable() != 0;
  const auto resume = c10::make_scope_exit([&] {
    if (collects) PyGC_Enable();
  });
  py::dict found;
  for (auto [thread, innermost] : py::dict(current_frames())) {
    py::list frames;
    auto frame = py::reinterpret_borrow<py::object>(innermost);
    while (frame && frames.size() < limit) {
      frames.append(frame);
      auto* caller = PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(frame.ptr()));
      frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(caller));
    }
    found[thread] = frames;
  }
  return found;
}

}  // namespace

void bind_stacks(py::module_& m) { m.def("stacks", &stacks, py::arg("limit")); }

}  // namespace torchddp::bindings
