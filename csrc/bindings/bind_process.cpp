// What ends a process, or asks it to end, while Python can't run.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "common/stop_signals.h"
#include "transport/c10d/failure_guard.h"

namespace torchddp::bindings {

using transport::FailureGuard;

void bind_process(py::module_& m) {
  m.def(
      "catch_stop_signals", [](const std::vector<int>& numbers) { catch_stop_signals(numbers); }, py::arg("numbers"),
      "The first of these signals is only noted from now on; the next ones do what they did before.");
  m.def("noted_stop_signal", &noted_stop_signal, "The signal that was noted; 0 if there was none.");
  m.def("pass_on_stop_signal", &pass_on_stop_signal, py::arg("number"), "Do what the signal did before.");
  m.def("release_stop_signals", &release_stop_signals, "Restore what they did before.");
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
