#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <array>
#include <utility>

#include "bindings/bindings.h"

// Note [Noting a call]
// torchddp/diagnose/watched.py notes each call of a collective here, because doing it in Python takes more than a microsecond.
// It uses CPython's own interface, since pybind11's argument conversion would take as long. As a bonus, Python handles no
// signal between what is written before the call and what is removed after it, so Ctrl-C can't leave a finished call marked as
// active.
namespace torchddp::bindings {
namespace {

// What is read and written: the items of the tuple that is the function's `self`.
enum Item {
  kActive,
  kLogs,
  kStarted,
  kTraining,
  kOuterFiles,
  kGetFrame,
  kOpenLog,
  kOuterFrame,
  kKeepStarted,
  kWork,
  kItems
};

// The leading arguments; those of the wrapped function follow.
enum Given { kFunction, kName, kIsCounted, kGroup, kTensor, kDetail, kOwnArguments };

PyObject* item(PyObject* self, Item which) { return PyTuple_GET_ITEM(self, which); }

py::object owned(PyObject* result) {
  if (result == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(result);
}

int checked(int status) {
  if (status < 0) {
    throw py::error_already_set();
  }
  return status;
}

// A name that is looked up on every call.
PyObject* constant(const char* name) { return PyUnicode_InternFromString(name); }

// None for anything that is not one of torch's groups.
py::object log_of(PyObject* self, PyObject* group) {
  const py::object key = owned(PyLong_FromVoidPtr(group));
  if (PyObject* log = PyDict_GetItemWithError(item(self, kLogs), key.ptr())) {
    return py::reinterpret_borrow<py::object>(log);
  }
  return owned(PyErr_Occurred() != nullptr ? nullptr : PyObject_CallOneArg(item(self, kOpenLog), group));
}

PyFrameObject* as_frame(const py::object& frame) { return reinterpret_cast<PyFrameObject*>(frame.ptr()); }

py::object code_of(const py::object& frame) {
  return owned(reinterpret_cast<PyObject*>(PyFrame_GetCode(as_frame(frame))));
}

// The calling program's code object and instruction; None and 0 on a thread that runs none of the program.
std::pair<py::object, py::object> caller(PyObject* self) {
  static PyObject* const depth = PyLong_FromLong(2);  // above the function that calls this and torch's decorator
  py::object frame = owned(PyObject_CallOneArg(item(self, kGetFrame), depth));
  py::object code = code_of(frame);
  if (checked(PySet_Contains(item(self, kOuterFiles), reinterpret_cast<PyCodeObject*>(code.ptr())->co_filename)) == 0) {
    frame = owned(PyObject_CallOneArg(item(self, kOuterFrame), frame.ptr()));
    if (frame.is_none()) {
      return {py::none(), py::int_(0)};
    }
    code = code_of(frame);
  }
  return {code, py::int_(PyFrame_GetLasti(as_frame(frame)))};
}

// The tensor's sizes as bytes, an int64 each, and its dtype: building a torch.Size would take five times as long. None and None
// for anything that is not a tensor (torch will complain) or has symbolic sizes.
std::pair<py::object, py::object> described(PyObject* object) {
  if (THPVariable_Check(object)) {
    const auto& tensor = THPVariable_Unpack(object);
    if (!tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
      const auto sizes = tensor.sizes();
      auto* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type()));
      return {py::bytes(reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof(int64_t)),
              py::reinterpret_borrow<py::object>(dtype)};
    }
  }
  return {py::none(), py::none()};
}

// Counts the call in its group's log.
py::object next_number(const py::object& log) {
  static PyObject* const one = PyLong_FromLong(1);
  static PyObject* const count = constant("count");
  py::object number = owned(PyNumber_Add(owned(PyObject_GetAttr(log.ptr(), count)).ptr(), one));
  checked(PyObject_SetAttr(log.ptr(), count, number.ptr()));
  return number;
}

// The call in the layout of torchddp.diagnose.calls.Call; None if its group is unknown.
py::object begin(PyObject* self, PyObject* const* args, const py::object& thread) {
  static PyObject* const append = constant("append");
  static PyObject* const recent = constant("recent");
  static PyObject* const training_thread = constant("thread");
  const py::object log = log_of(self, args[kGroup]);
  if (log.is_none()) {
    return log;
  }
  const auto [code, at] = caller(self);
  if (!code.is_none()) {
    checked(PyObject_SetAttr(item(self, kTraining), training_thread, thread.ptr()));
  }
  const auto [sizes, dtype] = described(args[kTensor]);
  const bool is_counted = checked(PyObject_IsTrue(args[kIsCounted])) != 0;
  const py::object number = is_counted ? next_number(log) : py::int_(0);
  py::object call = owned(PyTuple_Pack(9, number.ptr(), args[kName], sizes.ptr(), dtype.ptr(), args[kDetail],
                                       code.ptr(), at.ptr(), thread.ptr(), log.ptr()));
  if (is_counted) {
    owned(PyObject_CallMethodOneArg(owned(PyObject_GetAttr(log.ptr(), recent)).ptr(), append, call.ptr()));
  }
  checked(PyDict_SetItem(item(self, kActive), thread.ptr(), call.ptr()));
  return call;
}

// Remembers what the call has started and the program has not waited for.
void keep_started(PyObject* self, PyObject* result, const py::object& call) {
  static PyObject* const append = constant("append");
  if (PyObject_TypeCheck(result, reinterpret_cast<PyTypeObject*>(item(self, kWork)))) {
    const py::object work = owned(PyWeakref_NewRef(result, nullptr));
    owned(
        PyObject_CallMethodOneArg(item(self, kStarted), append, owned(PyTuple_Pack(2, work.ptr(), call.ptr())).ptr()));
  } else if (result != Py_None) {
    const std::array<PyObject*, 2> given = {result, call.ptr()};
    owned(PyObject_Vectorcall(item(self, kKeepStarted), given.data(), given.size(), nullptr));
  }
}

PyObject* noted(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  if (count < kOwnArguments) {
    PyErr_SetString(PyExc_TypeError, "noted(function, name, is_counted, group, tensor, detail, ...)");
    return nullptr;
  }
  try {
    const py::object thread = owned(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
    PyObject* active = item(self, kActive);
    const bool is_inner = checked(PyDict_Contains(active, thread.ptr())) != 0;
    const py::object call = is_inner ? py::none() : begin(self, args, thread);
    py::object result = py::reinterpret_steal<py::object>(
        PyObject_Vectorcall(args[kFunction], args + kOwnArguments, count - kOwnArguments, names));
    if (!call.is_none()) {
      const py::error_scope raised_by_it;
      PyDict_DelItem(active, thread.ptr());
      PyErr_Clear();  // absent in a forked child
    }
    if (result && !call.is_none()) {
      keep_started(self, result.ptr(), call);
    }
    return result.release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables): CPython's own
PyMethodDef noted_method = {
    "noted", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&noted)), METH_FASTCALL | METH_KEYWORDS,
    "noted(function, name, is_counted, group, tensor, detail, ...): call function(...) and record the call."};

}  // namespace

void bind_calls(py::module_& m) {
  m.def(
      "call_noter",
      [](const py::tuple& items) {
        TORCH_CHECK(items.size() == kItems && PyType_Check(item(items.ptr(), kWork)), "not what watched.py gives");
        return owned(PyCFunction_New(&noted_method, items.ptr()));
      },
      py::arg("items"),
      "The function `noted(function, name, is_counted, group, tensor, detail, ...)`, which calls `function(...)` and "
      "records the call in the form of `torchddp.diagnose.calls`; `items` are what it needs, in the order of "
      "csrc/bindings/bind_calls.cpp.");
}

}  // namespace torchddp::bindings
