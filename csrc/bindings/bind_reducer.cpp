// The Reducer's Python surface: a step and its modes. Names with an underscore are torch's: its DDP module, join hooks and
// communication hooks call them.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "bindings/bind_reducer.h"

namespace torchddp::bindings {
namespace {

using namespace reducer;
using FuturePtr = std::shared_ptr<torch::jit::PythonFutureWrapper>;

std::shared_ptr<Reducer> make_reducer(std::vector<at::Tensor> params, std::vector<plan::ParamSpec> specs,
                                      c10::intrusive_ptr<c10d::ProcessGroup> group,
                                      std::shared_ptr<transport::Transport> transport, std::vector<int64_t> caps_bytes,
                                      int64_t solo_bytes, bool find_unused_parameters, bool gradient_as_bucket_view,
                                      bool gradients_share_storage, bool skip_all_reduce_unused_params,
                                      bool compiled_autograd_takes_over, std::optional<at::ScalarType> wire_dtype,
                                      std::optional<at::ScalarType> reduce_dtype, GradPrecision grad_precision,
                                      bool gradient_stats, bool find_nonfinite, bool raise_nonfinite,
                                      int64_t in_place_bytes, bool pack_whole_buckets, bool weighted,
                                      bool zero_weights_raise, std::chrono::milliseconds timeout) {
  ReducerConfig config;
  config.limits = {std::move(caps_bytes), solo_bytes};
  config.find_unused_parameters = find_unused_parameters;
  config.gradient_as_bucket_view = gradient_as_bucket_view;
  config.view_storage = gradients_share_storage ? bucket::ViewStorage::kBucket : bucket::ViewStorage::kOwn;
  config.skip_all_reduce_unused_params = skip_all_reduce_unused_params;
  config.compiled_autograd_takes_over = compiled_autograd_takes_over;
  config.wire_dtype = wire_dtype;
  config.reduce_dtype = reduce_dtype;
  config.grad_precision = grad_precision;
  config.gradient_stats = gradient_stats;
  config.find_non_finite = find_nonfinite;
  config.raise_non_finite = raise_nonfinite;
  config.in_place_bytes = in_place_bytes;
  config.pack_whole_buckets = pack_whole_buckets;
  config.weighted = weighted;
  config.zero_weights_raise = zero_weights_raise;
  config.timeout = timeout;
  const py::gil_scoped_release release;
  return no_gil(std::make_shared<Reducer>(std::move(params), std::move(specs), std::move(group), std::move(transport),
                                          std::move(config)));
}

void bind_step(PyReducer& c) {
  c.def("prepare_for_forward", &Reducer::begin_forward, NoGil())
      .def(
          "prepare_for_backward",
          [](Reducer& self, const std::vector<at::Tensor>& outputs, bool has_hooks) {
            self.prepare_for_backward(outputs, has_hooks);
          },
          py::arg("output"), py::arg("has_hooks") = true, NoGil())
      .def(
          "prepare_for_backward",
          [](Reducer& self, const at::Tensor& output, bool has_hooks) {
            self.prepare_for_backward({&output, 1}, has_hooks);
          },
          py::arg("output"), py::arg("has_hooks") = true, NoGil())
      .def(
          "_autograd_hook", [](Reducer& self, int64_t index) { self.on_grad_ready(index, nullptr); }, py::arg("index"),
          NoGil())
      .def("weigh", &Reducer::weigh, py::arg("weight"), py::arg("count"), py::arg("begins") = true,
           py::arg("ends") = true, NoGil(),
           "Multiply the next backward's gradients by `weight`, and add `count` to the divisor.")
      .def("_delay_all_reduce", &Reducer::delay_all_reduce, NoGil())
      .def("reduce_now", &Reducer::reduce_now, NoGil(), "Reduce the existing gradients without a backward. Collective.")
      .def("_check_reducer_finalized", &Reducer::check_finalized, NoGil())
      .def("check_not_unfinished", &Reducer::check_not_unfinished, NoGil(),
           "RuntimeError, naming missing gradients, if a backward ended before all were ready.")
      .def("rebuild_buckets", &Reducer::rebuild_buckets, NoGil(),
           "Rebuild buckets in the measured order, once. Collective if it returns true.")
      .def("adopt_plan", &Reducer::adopt_plan, py::arg("plan"), NoGil(),
           "Adopt rank 0's plan, or its current one if it passes None. Returns whether buckets changed. Collective, "
           "between steps.")
      .def("_push_all_rebuilt_params", [](Reducer&) {});  // torch's join() calls it; match_step does it
}

void bind_modes(PyReducer& c) {
  c.def("_set_static_graph", &Reducer::set_static_graph, NoGil())
      .def(
          "register_comm_hook",
          [](Reducer& self, py::object state, py::object hook) {
            self.set_hook([&](CommHook& mine) {
              mine.install(std::make_unique<c10d::PythonCommHook>(std::move(state), std::move(hook)));
            });
          },
          py::arg("state"), py::arg("hook"))
      .def(
          "register_builtin_comm_hook",
          [](Reducer& self, c10d::BuiltinCommHookType type) {
            self.set_hook([&](CommHook& mine) { mine.install_builtin(type, self.parts().context.group); });
          },
          py::arg("comm_hook_type"))
      .def(
          "_run_allreduce_hook",
          [](Reducer& self, c10d::GradBucket& bucket) {
            return std::make_shared<torch::jit::PythonFutureWrapper>(self.parts().shadow.all_reduce(bucket));
          },
          py::arg("bucket"), NoGil())
      .def(
          "_install_post_backward_futures",
          [](Reducer& self, const std::vector<FuturePtr>& futures) {
            std::vector<c10::intrusive_ptr<c10::ivalue::Future>> list;
            for (const auto& future : futures) {
              list.push_back(future->fut);
            }
            self.parts().futures.add(list);
          },
          py::arg("futures"))
      .def("before_next_step", of(&Parts::queue, &LaunchQueue::before_next_step), py::arg("agree"),
           "`agree()` is called once before the next step sends anything; again if it has raised an exception.")
      .def("set_forward_pass_work_handle", of(&Parts::divisor, &Divisor::set_forward_work), py::arg("work"),
           py::arg("use_static_world_size"))
      .def("set_divisor", of(&Parts::divisor, &Divisor::set), py::arg("divisor"),
           "`divisor()` returns, in each backward, the number of ranks to average over.")
      .def("_set_optimizer_in_backward", of(&Parts::packed, &PackedGrads::leave_to_optimizer))
      .def("_set_mixed_precision_param_dtype", of(&Parts::packers, &Packers::set_grad_dtype), py::arg("dtype"))
      .def("_set_sparse_metadata", of(&Parts::packers, &Packers::set_sparse_metadata), py::arg("global_unique_ids"))
      .def("share_gradients", &Reducer::share_gradients, NoGil(),
           "Another reducer averages the same gradients: keep them in their own memory from the next backward on.")
      .def_property_readonly("awaits_backward", of(&Parts::step, &Step::armed),
                             "Whether a forward was synchronized whose backward has not ended.")
      .def(
          "main_grads",
          [](Reducer& self) {
            const auto& main_grads = self.parts().context.main_grads;
            return main_grads == nullptr ? std::vector<at::Tensor>() : main_grads->shown();
          },
          "Per parameter: the tensor that gradients accumulate in, always the same. None unless they are kept outside "
          ".grad.")
      .def(
          "clear_main_grads",
          [](Reducer& self, const std::vector<int64_t>& params) {
            for (const auto param : params) {
              self.parts().context.main_grads->clear(param);
            }
          },
          py::arg("params"), NoGil(), "Zero the main gradients of the parameters with these indices.")
      .def(
          "take_main_grad",
          [](Reducer& self, int64_t param, bool take) { self.parts().context.main_grads->set_taken(param, take); },
          py::arg("param"), py::arg("take"), "Whether the parameter's gradients go to its main gradient here.")
      .def("remove_autograd_hooks", &Reducer::remove_autograd_hooks, NoGil())
      .def("close", &Reducer::close, NoGil(), "Remove hooks and buckets, permanently.")
      .def("take_over", &Reducer::take_over, py::arg("before"), NoGil(),
           "Continue where a closed reducer stopped, for the same parameters or others.")
      .def("update_process_group", &Reducer::update_process_group, py::arg("new_process_group"),
           py::arg("transport").none(false), NoGil())
      .def("match_step", &Reducer::match_step, NoGil(),
           "On a rank without inputs: take part in a step of the others, with zeros. Collective.")
      .def("skip_nothing", of(&Parts::queue, &LaunchQueue::skip_nothing),
           "From now on, also reduce buckets whose parameters no rank uses.")
      .def("reset_state", &Reducer::reset_state, NoGil());
}

// torch's names for methods that this package calls too.
void bind_torch_names(PyReducer& c) {
  for (const char* name :
       {"rebuild_buckets", "register_comm_hook", "register_builtin_comm_hook", "set_forward_pass_work_handle",
        "remove_autograd_hooks", "update_process_group", "reset_state"}) {
    c.attr((std::string("_") + name).c_str()) = c.attr(name);
  }
  c.attr("_ddp_graph_static") = c.attr("graph_has_been_static");
}

}  // namespace

void bind_reducer(py::module_& m) {
  py::enum_<GradPrecision>(m, "GradPrecision",
                           "The dtype in which gradients of 16-bit parameters are reduced and stored.")
      .value("OF_PARAMETER", GradPrecision::kOfParameter)
      .value("REDUCED", GradPrecision::kReduced, "reduced in float32, and rounded to .grad")
      .value("GRADS", GradPrecision::kGrads, ".grad is float32")
      .value("MAIN_GRADS", GradPrecision::kMainGrads, "accumulated in float32, outside .grad");
  PyReducer c(m, "Reducer",
              "Packs gradients into buckets and reduces them while autograd runs. Created by DistributedDataParallel.");
  c.def(py::init(&make_reducer), py::arg("params"), py::arg("specs"), py::arg("process_group"),
        py::arg("transport").none(false), py::kw_only(), py::arg("caps_bytes"), py::arg("solo_bytes") = 0,
        py::arg("find_unused_parameters") = false, py::arg("gradient_as_bucket_view") = true,
        py::arg("gradients_share_storage") = false, py::arg("skip_all_reduce_unused_params") = false,
        py::arg("compiled_autograd_takes_over") = false, py::arg("wire_dtype") = py::none(),
        py::arg("reduce_dtype") = py::none(), py::arg("grad_precision") = GradPrecision::kOfParameter,
        py::arg("gradient_stats") = false, py::arg("find_nonfinite") = false, py::arg("raise_nonfinite") = false,
        py::arg("in_place_bytes") = 0, py::arg("pack_whole_buckets") = false, py::arg("weighted") = false,
        py::arg("zero_weights_raise") = true, py::arg("timeout") = transport::kTransportTimeout);
  m.def(
      "finished_steps", [] { return all_finished_steps.load(std::memory_order_relaxed); },
      "Number of synchronized backwards that this process's reducers, including destroyed ones, have finished.");
  bind_step(c);
  bind_modes(c);
  bind_reducer_reports(m, c);
  bind_torch_names(c);
}

}  // namespace torchddp::bindings
