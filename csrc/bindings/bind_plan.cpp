#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "plan/bucket_plan.h"
#include "plan/merge_plan.h"

namespace torchddp::bindings {

void bind_plan(py::module_& m) {
  using namespace plan;
  py::class_<ParamSpec>(m, "ParamSpec", "What a bucket plan needs to know of a parameter.")
      .def(py::init(
               [](std::string name, int64_t numel, int64_t itemsize, int32_t dtype, int32_t device, bool sparse,
                  int32_t owner) { return ParamSpec{std::move(name), numel, itemsize, dtype, device, sparse, owner}; }),
           py::arg("name"), py::arg("numel"), py::arg("itemsize"), py::arg("dtype") = 0, py::arg("device") = 0,
           py::arg("sparse") = false, py::arg("owner") = -1)
      .def_readonly("name", &ParamSpec::name)
      .def_readonly("numel", &ParamSpec::numel)
      .def_readonly("itemsize", &ParamSpec::itemsize)
      .def_readonly("dtype", &ParamSpec::dtype)
      .def_readonly("device", &ParamSpec::device)
      .def_readonly("sparse", &ParamSpec::sparse)
      .def_readonly("owner", &ParamSpec::owner);

  py::class_<BucketSpec>(m, "BucketSpec",
                         "One bucket of a plan: parameter indices and their offsets in flat memory (elements).")
      .def_property_readonly("params",
                             [](const BucketSpec& bucket) {
                               std::vector<int64_t> params;
                               for (const auto& slot : bucket.slots) {
                                 params.push_back(slot.param);
                               }
                               return params;
                             })
      .def_property_readonly("offsets",
                             [](const BucketSpec& bucket) {
                               std::vector<int64_t> offsets;
                               for (const auto& slot : bucket.slots) {
                                 offsets.push_back(slot.offset);
                               }
                               return offsets;
                             })
      .def_readonly("numel", &BucketSpec::numel)
      .def_property_readonly("nbytes", [](const BucketSpec& bucket) { return bucket.numel * bucket.itemsize; })
      .def_readonly("dtype", &BucketSpec::dtype)
      .def_readonly("device", &BucketSpec::device)
      .def_readonly("sparse", &BucketSpec::sparse)
      .def_readonly("owner", &BucketSpec::owner);

  py::class_<BucketPlan>(m, "BucketPlan", "Which gradient lies where in which bucket, buckets in launch order.")
      .def_readonly("buckets", &BucketPlan::buckets)
      .def("__eq__", [](const BucketPlan& a, const BucketPlan& b) { return a == b; })
      .def("__len__", [](const BucketPlan& plan) { return plan.buckets.size(); });

  m.def(
      "make_bucket_plan",
      [](const std::vector<ParamSpec>& params, const std::vector<int64_t>& order, std::vector<int64_t> caps_bytes,
         int64_t alignment_bytes, int64_t solo_bytes) {
        return make_bucket_plan(params, order, {std::move(caps_bytes), alignment_bytes, solo_bytes});
      },
      py::arg("params"), py::arg("order"), py::arg("caps_bytes"), py::arg("alignment_bytes") = 1,
      py::arg("solo_bytes") = 0,
      "Buckets for parameters whose gradients become ready in `order` (a permutation of the parameter indices). "
      "ValueError for bad input.");
  m.def(
      "make_merged_plan",
      [](const std::vector<ParamSpec>& params, const std::vector<int64_t>& order, const std::vector<double>& ready_s,
         double alpha_s, double beta_s_per_byte, double pack_s_per_byte, int64_t alignment_bytes, double slack_s) {
        return make_merged_plan(params, order, ready_s, {alpha_s, beta_s_per_byte, pack_s_per_byte}, alignment_bytes,
                                slack_s);
      },
      py::arg("params"), py::arg("order"), py::arg("ready_s"), py::arg("alpha_s"), py::arg("beta_s_per_byte"),
      py::arg("pack_s_per_byte") = 0.0, py::arg("alignment_bytes") = 1, py::arg("slack_s") = 0.0, NoGil(),
      "The plan whose last bucket is reduced the earliest among those that cut `order` into runs (MG-WFBP, Shi et al. "
      "2019). A message of n bytes takes alpha_s + n * beta_s_per_byte. ValueError for bad input.");
  m.def(
      "predict_finish_s",
      [](const BucketPlan& plan, const std::vector<ParamSpec>& params, const std::vector<double>& ready_s,
         double alpha_s, double beta_s_per_byte, double pack_s_per_byte) {
        return predict_finish_s(plan, params, ready_s, {alpha_s, beta_s_per_byte, pack_s_per_byte});
      },
      py::arg("plan"), py::arg("params"), py::arg("ready_s"), py::arg("alpha_s"), py::arg("beta_s_per_byte"),
      py::arg("pack_s_per_byte") = 0.0,
      "Seconds from the begin of backward until the last bucket of `plan` is reduced.");
  m.def("reverse_registration_order", &reverse_registration_order, py::arg("num_params"));
  m.def(
      "complete_order",
      [](const std::vector<int64_t>& seen, int64_t num_params) { return complete_order(seen, num_params); },
      py::arg("seen"), py::arg("num_params"));
  m.def("encode_plan", &encode_plan, py::arg("plan"), py::arg("num_params"));
  m.def(
      "decode_plan",
      [](const std::vector<int64_t>& words, const std::vector<ParamSpec>& params, int64_t alignment_bytes) {
        return decode_plan(words, params, alignment_bytes);
      },
      py::arg("words"), py::arg("params"), py::arg("alignment_bytes") = 1);
}

}  // namespace torchddp::bindings
