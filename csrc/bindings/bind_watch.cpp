#include <utility>

#include "bindings/bindings.h"

namespace torchddp::bindings {
namespace {

// Note [Exceptions from another thread]
// Python raises an asynchronous exception at the start of the next Python function or at a backward jump. If that function is
// the `__exit__` of the block that the exception was meant to end, the block never gets to report its end. Here __enter__ and
// __exit__ are C functions, in which Python raises nothing, and a pending exception is canceled before any of their Python
// code runs. The GIL makes each method below atomic.
class AsyncGate {
 public:
  void open() {
    thread_ = PyThread_get_thread_ident();
    open_ = true;
  }

  void close() {
    open_ = false;
    if (std::exchange(raised_, false)) {
      PyThreadState_SetAsyncExc(thread_, nullptr);
    }
  }

  bool is_open() const { return open_; }

  bool raise_inside(const py::type& type) {
    raised_ = open_;
    return open_ && PyThreadState_SetAsyncExc(thread_, type.ptr()) == 1;
  }

 private:
  unsigned long thread_ = 0;
  bool open_ = false;
  bool raised_ = false;
};

}  // namespace

void bind_watch(py::module_& m) {
  py::class_<AsyncGate>(
      m, "AsyncGate",
      "A context whose body another thread can end with an exception, which never arrives after the body.\n\n"
      "Subclasses have `_begin()`, called before the body, and `_leave(type, error, traceback)` "
      "instead of `__exit__`.")
      .def(py::init<>())
      .def_property_readonly("is_open", &AsyncGate::is_open, "Whether the body is running.")
      .def("raise_inside", &AsyncGate::raise_inside, py::arg("type"),
           "From any thread: raise `type()` in the body, at its next Python instruction. False if the body has ended.")
      .def("__enter__",
           [](py::object self) {
             self.attr("_begin")();
             self.cast<AsyncGate&>().open();
             return self;
           })
      .def("__exit__", [](py::object self, const py::object& type, const py::object& error, const py::object& trace) {
        self.cast<AsyncGate&>().close();
        return py::object(self.attr("_leave")(type, error, trace));
      });
}

}  // namespace torchddp::bindings
