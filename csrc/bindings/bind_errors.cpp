#include <sys/syscall.h>
#include <torch/csrc/Exceptions.h>
#include <unistd.h>

#include "bindings/bindings.h"
#include "common/errors.h"
#include "common/signals.h"

namespace torchddp::bindings {
namespace {

// Created once with the module and never destroyed: exceptions may be raised while the interpreter shuts down.
PyObject* transport_error_type = nullptr;
PyObject* internal_error_type = nullptr;

// See Note [Errors across autograd] in common/errors.h.
struct AcrossAutograd final : torch::PyTorchError {
  AcrossAutograd(const char* text, PyObject* type) : torch::PyTorchError(text), type_(type) {}
  PyObject* python_type() override { return type_; }

 private:
  PyObject* type_;
};

void throw_across(const std::runtime_error& error) {
  auto* type = transport_error_type;
  if (dynamic_cast<const NonFiniteError*>(&error) != nullptr) type = PyExc_FloatingPointError;
  if (dynamic_cast<const ZeroWeightError*>(&error) != nullptr) type = PyExc_ValueError;
  throw AcrossAutograd(error.what(), type);
}

// An exception raised by a signal handler. Whatever catches its first base, such as torch's engine and pybind11, restores it
// unchanged.
struct RaisedByHandler final : py::error_already_set, SignalInterrupt {};

// See Note [Signals in a wait] in common/signals.h.
void check_python_signals() {
  // Python's main thread is the process's main thread, in a forked child too.
  if (syscall(SYS_gettid) != getpid() || Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_Occurred() == nullptr && PyErr_CheckSignals() != 0) throw RaisedByHandler();
}

PyObject* make_type(py::module_& m, const char* name, const char* doc) {
  const auto qualified = std::string("torchddp.") + name;
  auto* type = PyErr_NewExceptionWithDoc(qualified.c_str(), doc, PyExc_RuntimeError, nullptr);
  if (type == nullptr) throw py::error_already_set();
  m.attr(name) = py::handle(type);
  return type;
}

}  // namespace

void bind_errors(py::module_& m) {
  transport_error_type =
      make_type(m, "TransportError",
                "A collective failed: a peer died or did not answer in time. Names rank, step, bucket and "
                "parameters. The reducer is idle again when this is raised.");
  internal_error_type = make_type(m, "InternalError", "A broken invariant of torchddp. Please report it.");
  m.attr("advice_for_a_lost_peer") = with_advice("");
  m.attr("advice_for_a_peer_gone") = kIfGone;
  signal_check = &check_python_signals;
  autograd_thrower = &throw_across;
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (AcrossAutograd& error) {
      PyErr_SetString(error.python_type(), error.what());
    } catch (const TransportError& error) {
      PyErr_SetString(transport_error_type, error.what());
    } catch (const InternalError& error) {
      PyErr_SetString(internal_error_type, error.what());
    }
  });
}

}  // namespace torchddp::bindings
