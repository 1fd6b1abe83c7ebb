#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "plan/bucket_plan.h"

namespace torchddp::bindings {
namespace {

// One field of all slots of a bucket.
auto each(int64_t plan::Slot::* field) {
  return [field](const plan::BucketSpec& bucket) {
    std::vector<int64_t> values;
    for (const auto& slot : bucket.slots) values.push_back(slot.*field);
    return values;
  };
}

}  // namespace

void bind_plan(py::module_& m) {
  using namespace plan;
  py::class_<ParamSpec>(m, "ParamSpec", "What a bucket plan needs to know about a parameter.")
      .def(py::init<std::string, int64_t, int64_t, int32_t, int32_t, bool, int32_t, int64_t>(), py::arg("name"),
           py::arg("numel"), py::arg("itemsize"), py::arg("dtype") = 0, py::arg("device") = 0,
           py::arg("sparse") = false, py::arg("owner") = -1, py::arg("alignment") = 1)
      .def_readonly("name", &ParamSpec::name)
      .def_readonly("numel", &ParamSpec::numel)
      .def_readonly("itemsize", &ParamSpec::itemsize)
      .def_readonly("dtype", &ParamSpec::dtype)
      .def_readonly("device", &ParamSpec::device)
      .def_readonly("sparse", &ParamSpec::sparse)
      .def_readonly("owner", &ParamSpec::owner)
      .def_readonly("alignment", &ParamSpec::alignment);

  py::class_<BucketSpec>(m, "BucketSpec",
                         "One bucket of a plan: parameter indices and their offsets in flat memory (elements).")
      .def_property_readonly("params", each(&Slot::param))
      .def_property_readonly("offsets", each(&Slot::offset))
      .def_readonly("numel", &BucketSpec::numel)
      .def_property_readonly(
          "nbytes",
          [](const BucketSpec& bucket) {
            int64_t numel = 0;
            for (const auto& slot : bucket.slots) numel += bucket.sparse ? 0 : slot.numel;
            return numel * bucket.itemsize;
          },
          "Bytes of the gradients without padding; 0 for a sparse one.");

  py::class_<BucketPlan>(m, "BucketPlan", "The position of each gradient in the buckets, which are in launch order.")
      .def(py::init([](const BucketIndices& buckets, const std::vector<ParamSpec>& params) {
             return plan_of(buckets, params);
           }),
           py::arg("buckets"), py::arg("params"),
           "From each bucket's parameter indices. ValueError if they are not a plan for these parameters.")
      .def_readonly("buckets", &BucketPlan::buckets)
      .def("__eq__", [](const BucketPlan& a, const BucketPlan& b) { return a == b; })
      .def("__len__", [](const BucketPlan& plan) { return plan.buckets.size(); });

  m.def(
      "make_bucket_plan",
      [](const std::vector<ParamSpec>& params, const std::vector<int64_t>& order, std::vector<int64_t> caps_bytes) {
        return make_bucket_plan(params, order, {std::move(caps_bytes)});
      },
      py::arg("params"), py::arg("order"), py::arg("caps_bytes"),
      "Buckets for parameters whose gradients become ready in `order` (a permutation of the parameter indices). "
      "ValueError for bad input.");
}

}  // namespace torchddp::bindings
