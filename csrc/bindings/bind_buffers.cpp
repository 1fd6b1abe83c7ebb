// A model's buffers: every forward looks for them, so here and not in Python.
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace torchddp::bindings {
namespace {

// Modules and buffers lie in dictionaries; scripted modules have objects with a method of that name instead.
template <typename Visit>
void each_value(const py::object& mapping, Visit&& visit) {
  if (PyDict_Check(mapping.ptr())) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(mapping.ptr(), &at, &key, &value) != 0;) {
      visit(py::handle(value));
    }
    return;
  }
  for (const auto value : mapping.attr("values")()) {
    visit(value);
  }
}

// In the order of module.buffers(): modules before their children, each module and each buffer once.
py::list module_buffers(const py::object& module) {
  static const py::handle kBuffers = py::str("_buffers").release();
  static const py::handle kModules = py::str("_modules").release();
  py::list found;
  std::unordered_set<const PyObject*> seen;
  std::vector<py::object> ahead{module};
  std::vector<py::object> visited;  // alive, so that no other object comes to have the address of one
  std::vector<py::object> children;
  while (!ahead.empty()) {
    auto current = std::move(ahead.back());
    ahead.pop_back();
    if (!seen.insert(current.ptr()).second) {
      continue;
    }
    each_value(py::getattr(current, kBuffers), [&](py::handle buffer) {
      if (!buffer.is_none() && seen.insert(buffer.ptr()).second) {
        found.append(buffer);
      }
    });
    each_value(py::getattr(current, kModules), [&](py::handle child) {
      if (!child.is_none()) {
        children.push_back(py::reinterpret_borrow<py::object>(child));
      }
    });
    for (; !children.empty(); children.pop_back()) {
      ahead.push_back(std::move(children.back()));
    }
    visited.push_back(std::move(current));
  }
  return found;
}

bool can_travel_as_bytes(const py::sequence& tensors) {
  std::optional<at::Device> device;
  for (const auto object : tensors) {
    if (!THPVariable_CheckExact(object.ptr())) {
      return false;
    }
    const auto& tensor = THPVariable_Unpack(object.ptr());
    if (tensor.layout() != at::kStrided || tensor.is_meta() || device.value_or(tensor.device()) != tensor.device()) {
      return false;
    }
    device = tensor.device();
  }
  return true;
}

}  // namespace

void bind_buffers(py::module_& m) {
  m.def("module_buffers", &module_buffers, py::arg("module"), "Each buffer once, in the order of `module.buffers()`.");
  m.def("can_travel_as_bytes", &can_travel_as_bytes, py::arg("tensors"),
        "Whether TensorBroadcast can take these: ordinary dense tensors of one device.");
}

}  // namespace torchddp::bindings
