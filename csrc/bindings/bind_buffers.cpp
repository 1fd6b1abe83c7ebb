// Finds a model's buffers and parameters, in C++ because every forward does it. Also makes tensors over flat memory that are
// independent of each other.
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "common/check.h"

namespace torchddp::bindings {
namespace {

// Modules and buffers are stored in dictionaries; scripted modules have objects with a method of the same name instead.
template <typename Visit>
void each_value(const py::object& mapping, Visit&& visit) {
  if (PyDict_Check(mapping.ptr())) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(mapping.ptr(), &at, &key, &value) != 0;) visit(py::handle(value));
    return;
  }
  for (const auto value : mapping.attr("values")()) visit(value);
}

// In the order of module.buffers() and parameters(): modules before their children, each module and each entry once. `name`:
// the attribute that holds the entries.
template <typename Visit>
void each_entry(const py::object& module, py::handle name, Visit&& visit) {
  static const py::handle kModules = py::str("_modules").release();
  std::unordered_set<const PyObject*> seen;
  std::vector<py::object> ahead{module};
  std::vector<py::object> visited;  // keeps them alive, so that no address is reused
  std::vector<py::object> children;
  while (!ahead.empty()) {
    auto current = std::move(ahead.back());
    ahead.pop_back();
    if (!seen.insert(current.ptr()).second) continue;
    each_value(py::getattr(current, name), [&](py::handle entry) {
      if (!entry.is_none() && seen.insert(entry.ptr()).second) visit(entry);
    });
    each_value(py::getattr(current, kModules), [&](py::handle child) {
      if (!child.is_none()) children.push_back(py::reinterpret_borrow<py::object>(child));
    });
    for (; !children.empty(); children.pop_back()) ahead.push_back(std::move(children.back()));
    visited.push_back(std::move(current));
  }
}

py::list module_buffers(const py::object& module) {
  static const py::handle kBuffers = py::str("_buffers").release();
  py::list found;
  each_entry(module, kBuffers, [&](py::handle buffer) { found.append(buffer); });
  return found;
}

// `known`: the module's parameters; `trained`: a byte each, whether it required grad.
bool trains_as_before(const py::object& module, const py::list& known, const py::bytes& trained) {
  static const py::handle kParameters = py::str("_parameters").release();
  const std::string_view flags = trained;
  size_t count = 0;
  bool same = true;
  each_entry(module, kParameters, [&](py::handle parameter) {
    same = same && count < known.size() &&
           PyList_GET_ITEM(known.ptr(), static_cast<Py_ssize_t>(count)) == parameter.ptr() &&
           THPVariable_Check(parameter.ptr()) &&
           THPVariable_Unpack(parameter.ptr()).requires_grad() == (flags[count] != 0);
    ++count;
  });
  return same && count == known.size();
}

bool can_travel_as_bytes(const py::sequence& tensors) {
  std::optional<at::Device> device;
  for (const auto object : tensors) {
    if (!THPVariable_CheckExact(object.ptr())) return false;
    const auto& tensor = THPVariable_Unpack(object.ptr());
    const bool plain = tensor.layout() == at::kStrided && !tensor.is_meta() && !tensor.is_conj() && !tensor.is_neg();
    if (!plain || device.value_or(tensor.device()) != tensor.device()) return false;
    device = tensor.device();
  }
  return true;
}

// A tensor with the shape and strides of `like`, which must be dense, over `flat` (1-d) from element `offset` on. It has its
// own storage, so saving or copying it does not drag the rest of `flat` along, and it keeps that memory alive.
at::Tensor make_flat_view(const at::Tensor& flat, int64_t offset, const at::Tensor& like) {
  TDDP_CHECK(flat.is_contiguous() && flat.scalar_type() == like.scalar_type() && offset >= 0 &&
                 offset + like.numel() <= flat.numel(),
             "a tensor of ", like.numel(), " elements of ", like.scalar_type(), " does not fit at element ", offset,
             " of ", flat.numel(), " of ", flat.scalar_type());
  TDDP_CHECK(like.is_non_overlapping_and_dense(), "a tensor with strides ", like.strides(), " for shape ", like.sizes(),
             " has no dense memory");
  auto* const data = static_cast<std::byte*>(flat.mutable_data_ptr()) + offset * static_cast<int64_t>(flat.itemsize());
  return at::from_blob(data, like.sizes(), like.strides(), 0, [flat](void*) {}, flat.options(), flat.device());
}

}  // namespace

void bind_buffers(py::module_& m) {
  m.def("module_buffers", &module_buffers, py::arg("module"), "Each buffer once, in the order of `module.buffers()`.");
  m.def("trains_as_before", &trains_as_before, py::arg("module"), py::arg("known"), py::arg("trained"),
        "Whether `known` are all of the module's parameters, and exactly those with a byte of 1 require grad.");
  m.def("can_travel_as_bytes", &can_travel_as_bytes, py::arg("tensors"),
        "Whether TensorBroadcast can send these: ordinary dense tensors on one device.");
  m.def("make_flat_view", &make_flat_view, py::arg("flat"), py::arg("offset"), py::arg("like"), NoGil(),
        "A tensor like `like` in the memory of `flat`, starting at element `offset`, with its own storage.");
}

}  // namespace torchddp::bindings
