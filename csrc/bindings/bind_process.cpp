// What ends a process, or asks it to end, while Python can't run; and where its threads are.
#include <Python.h>
#include <c10/util/ScopeExit.h>
#include <frameobject.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>

#include "bindings/bindings.h"
#include "common/stop_signals.h"
#include "transport/c10d/failure_guard.h"

namespace torchddp::bindings {
namespace {

using transport::FailureGuard;

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

// A Python thread that returns from C++ then ends by unwinding, without an exception, which destructors turn into an abort.
void keep_threads_at_exit() {
  static const auto before = std::get_terminate();
  std::set_terminate([] {
    while (syscall(SYS_gettid) != getpid() && !std::current_exception()) pause();
    before();
  });
}

}  // namespace

void bind_process(py::module_& m) {
  m.def("stacks", &stacks, py::arg("limit"));
  m.def("keep_threads_at_exit", &keep_threads_at_exit);
  m.def("catch_stop_signals", &catch_stop_signals, py::arg("numbers"), py::arg("for_parent") = false,
        "The first of these signals is only noted from now on; the next ones do what they did before.");
  m.def("noted_stop_signal", &noted_stop_signal, "The signal that was noted; 0 if there was none.");
  m.def("pass_on_stop_signal", &pass_on_stop_signal, py::arg("number"), "Do what the signal did before.");
  m.def("release_stop_signals", &release_stop_signals, py::arg("heeded"), "Restore what they did before.");
  py::class_<FailureGuard, std::shared_ptr<FailureGuard>>(
      m, "FailureGuard", "A native thread that ends this process if another rank has failed, while Python is stuck.")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, std::string failure, std::string saving,
                       std::chrono::milliseconds patience, std::string last_words) {
             return no_gil(std::make_shared<FailureGuard>(
                 store, FailureGuard::Keys{.failure = std::move(failure), .saving = std::move(saving)}, patience,
                 std::move(last_words)));
           }),
           py::arg("store"), py::arg("failure"), py::arg("saving"), py::arg("patience"), py::arg("last_words"))
      .def("sign", &FailureGuard::sign, py::arg("saving"), "The Python thread that would end the process still runs.");
}

}  // namespace torchddp::bindings
