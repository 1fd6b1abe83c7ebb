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
using PyFuture = std::shared_ptr<torch::jit::PythonFutureWrapper>;

std::shared_ptr<Reducer> make_reducer(std::vector<at::Tensor> params, std::vector<plan::ParamSpec> specs,
                                      c10::intrusive_ptr<c10d::ProcessGroup> group,
                                      std::shared_ptr<transport::Transport> transport, ReducerConfig config) {
  const py::gil_scoped_release release;
  return no_gil(std::make_shared<Reducer>(std::move(params), std::move(specs), std::move(group), std::move(transport),
                                          std::move(config)));
}

// Each option is a keyword argument and a field.
void bind_config(py::module_& m) {
  py::enum_<GradPrecision>(m, "GradPrecision",
                           "The dtype in which gradients of 16-bit parameters are reduced and stored.")
      .value("OF_PARAMETER", GradPrecision::kOfParameter)
      .value("REDUCED", GradPrecision::kReduced, "reduced in float32, and rounded to .grad")
      .value("GRADS", GradPrecision::kGrads, ".grad is float32")
      .value("MAIN_GRADS", GradPrecision::kMainGrads, "accumulated in float32, outside .grad");
  py::enum_<bucket::ViewStorage>(m, "ViewStorage", "Which storage gradients that are views of a bucket use.")
      .value("OWN", bucket::ViewStorage::kOwn)
      .value("BUCKET", bucket::ViewStorage::kBucket);
  py::class_<ReducerConfig>(m, "ReducerConfig", "The options of a Reducer.")
      .def(py::init([](const py::kwargs& options) {
        auto config = py::cast(ReducerConfig());
        for (const auto& [name, value] : options) py::setattr(config, name, value);
        return config.cast<ReducerConfig>();
      }))
      .def_readwrite("caps_bytes", &ReducerConfig::caps_bytes)
      .def_readwrite("solo_bytes", &ReducerConfig::solo_bytes)
      .def_readwrite("find_unused_parameters", &ReducerConfig::find_unused_parameters)
      .def_readwrite("gradient_as_bucket_view", &ReducerConfig::gradient_as_bucket_view)
      .def_readwrite("view_storage", &ReducerConfig::view_storage)
      .def_readwrite("skip_all_reduce_unused_params", &ReducerConfig::skip_all_reduce_unused_params)
      .def_readwrite("compiled_autograd_takes_over", &ReducerConfig::compiled_autograd_takes_over)
      .def_readwrite("wire_dtype", &ReducerConfig::wire_dtype)
      .def_readwrite("reduce_dtype", &ReducerConfig::reduce_dtype)
      .def_readwrite("grad_precision", &ReducerConfig::grad_precision)
      .def_readwrite("gradient_stats", &ReducerConfig::gradient_stats)
      .def_readwrite("find_nonfinite", &ReducerConfig::find_non_finite)
      .def_readwrite("raise_nonfinite", &ReducerConfig::raise_non_finite)
      .def_readwrite("in_place_bytes", &ReducerConfig::in_place_bytes)
      .def_readwrite("pack_whole_buckets", &ReducerConfig::pack_whole_buckets)
      .def_readwrite("weighted", &ReducerConfig::weighted)
      .def_readwrite("zero_weights_raise", &ReducerConfig::zero_weights_raise)
      .def_readwrite("timeout", &ReducerConfig::timeout);
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
            return std::make_shared<torch::jit::PythonFutureWrapper>(self.all_reduce_as_others(bucket));
          },
          py::arg("bucket"), NoGil())
      .def(
          "_install_post_backward_futures",
          [](Reducer& self, const std::vector<PyFuture>& futures) {
            std::vector<FuturePtr> list;
            for (const auto& future : futures) list.push_back(future->fut);
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
            for (const auto param : params) self.parts().context.main_grads->clear(param);
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
  bind_config(m);
  PyReducer c(m, "Reducer",
              "Packs gradients into buckets and reduces them while autograd runs. Created by DistributedDataParallel.");
  c.def(py::init(&make_reducer), py::arg("params"), py::arg("specs"), py::arg("process_group"),
        py::arg("transport").none(false), py::arg("config"));
  m.def(
      "finished_steps", [] { return all_finished_steps.load(std::memory_order_relaxed); },
      "Number of synchronized backwards that this process's reducers, including destroyed ones, have finished.");
  bind_step(c);
  bind_modes(c);
  bind_reducer_reports(m, c);
  bind_torch_names(c);
}

}  // namespace torchddp::bindings
