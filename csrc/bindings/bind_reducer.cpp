// The Reducer's Python surface. Names with an underscore are torch's: its DDP module, join hooks and communication hooks call
// them.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <array>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include "bindings/bindings.h"
#include "common/check.h"
#include "reducer/reducer.h"

namespace torchddp::bindings {
namespace {

using namespace reducer;
using PyFuture = std::shared_ptr<torch::jit::PythonFutureWrapper>;
using PyReducer = py::class_<Reducer, std::shared_ptr<Reducer>>;

// Exposes a method of one of the reducer's parts as a method of the reducer. `part`: a member of Parts, or a function of it.
template <typename Find, typename Part, typename Result, typename... Args>
auto of(Find part, Result (Part::*method)(Args...)) {
  return [part, method](Reducer& self, Args... args) -> std::decay_t<Result> {
    return (std::invoke(part, self.parts()).*method)(std::forward<Args>(args)...);
  };
}
template <typename Find, typename Part, typename Result, typename... Args>
auto of(Find part, Result (Part::*method)(Args...) const) {
  return [part, method](Reducer& self, Args... args) -> std::decay_t<Result> {
    return (std::invoke(part, self.parts()).*method)(std::forward<Args>(args)...);
  };
}

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
      .def("prepare_for_backward", &Reducer::prepare_for_backward, py::arg("output"), py::arg("has_hooks") = true,
           NoGil())
      .def(
          "prepare_for_backward",
          [](Reducer& self, const at::Tensor& output) { self.prepare_for_backward({output}, true); }, NoGil())
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

// --- reports ---

py::dict traffic_dict(Reducer& self) {
  const auto& last = self.parts().events.stats().last;
  auto result = to_dict(last.traffic);
  if (last.hook_bytes > 0) result["hook"] = py::make_tuple(last.hook_bytes, py::none());
  return result;
}

const at::Tensor& gradient_stats(Reducer& self) {
  const auto& stats = self.parts().layout.gradient_stats();
  TDDP_CHECK(stats.defined(), "gradients are only measured by a DistributedDataParallel with gradient_stats=True");
  return stats;
}

std::vector<std::tuple<int64_t, int64_t, int64_t>> nonfinite_tuples(Reducer& self) {
  std::vector<std::tuple<int64_t, int64_t, int64_t>> result;
  for (const auto& found : self.parts().non_finite.episode()) {
    result.emplace_back(found.step, found.param, found.count);
  }
  return result;
}

py::dict stats_dict(Reducer& self) {
  const auto& stats = self.parts().events.stats();
  const auto average = [&](int64_t sum) { return stats.finished == 0 ? 0 : sum / stats.finished; };
  py::dict result;
  result["iteration"] = stats.steps;
  result["finished"] = stats.finished;
  result["num_buckets_reduced"] = stats.last.buckets_reduced;
  result["bytes_reduced"] = stats.last.bytes_reduced;
  for (size_t i = 0; i < transport::kNumRoutes; ++i) {
    if (const auto& route = stats.last.traffic.routes[i]; route != transport::RouteBytes{}) {
      result[py::str(std::string("wire_bytes_") + transport::kRouteNames[i])] = route.wire_bytes;
    }
  }
  result["forward_compute_time_start"] = stats.last.forward_begin_ns;
  result["backward_compute_time_start"] = stats.last.backward_begin_ns;
  result["backward_comm_time_start"] = stats.last.comm_begin_ns;
  result["backward_compute_time_end"] = stats.last.backward_compute_end_ns;
  result["backward_comm_time_end"] = stats.last.comm_end_ns;
  result["forward_compute_time"] = stats.last.forward_ns();
  result["backward_compute_time"] = stats.last.backward_ns();
  result["backward_comm_time"] = stats.last.comm_ns();
  result["backward_compute_comm_overlap_time"] = stats.last.overlap_ns();
  result["exposed_comm_time"] = stats.last.exposed_ns();
  result["avg_forward_compute_time"] = average(stats.sum_forward_ns);
  result["avg_backward_compute_time"] = average(stats.sum_backward_ns);
  result["avg_backward_comm_time"] = average(stats.sum_comm_ns);
  result["avg_backward_compute_comm_overlap_time"] = average(stats.sum_overlap_ns);
  return result;
}

const char* name_of(const Status& status) {
  constexpr std::array<const char*, 3> kNames = {"idle", "forward", "backward"};
  return status.waits ? "waiting" : kNames.at(static_cast<size_t>(status.phase));
}

const char* name_of(timeline::EventKind kind) {
  constexpr std::array<const char*, 8> kNames = {"forward_begin", "backward_begin", "grad_ready", "packed",
                                                 "launched",      "wait_begin",     "done",       "backward_end"};
  return kNames.at(static_cast<size_t>(kind));
}

py::dict status_dict(Reducer& self) {
  Status status;
  {
    const py::gil_scoped_release release;
    status = self.status();
  }
  py::list buckets;
  for (const auto& bucket : status.buckets) {
    py::list missing;
    for (const auto param : bucket.missing) missing.append(self.parts().context.spec(param).name);
    py::dict entry;
    entry["state"] = bucket::name_of(bucket.state);
    entry["missing"] = std::move(missing);
    buckets.append(std::move(entry));
  }
  py::dict result;
  result["step"] = status.step;
  result["phase"] = name_of(status);
  result["waits_for"] = status.waits_for;
  result["bucket"] = status.bucket;
  result["waited_s"] = static_cast<double>(status.waited_ns) * 1e-9;
  result["num_buckets"] = status.buckets.size();
  result["buckets"] = std::move(buckets);
  result["armed"] = status.armed;
  result["error"] = status.error;
  return result;
}

std::vector<int64_t> changed_gradients(Reducer& self) {
  if (self.parts().step.is_under_way()) return {};
  std::vector<int64_t> result;
  for (const auto change : self.parts().changes.take()) result.push_back(static_cast<int64_t>(change));
  return result;
}

LiveStatus& live(Parts& parts) { return parts.events.live(); }
timeline::Timeline& timeline_of(Parts& parts) { return parts.events.timeline(); }

void bind_status(PyReducer& c) {
  c.def("status", &status_dict, "Where the step is; from any thread, at any time. See docs/hang_reports.md.")
      .def(
          "set_peers",
          [](Reducer& self, const std::vector<std::array<int64_t, 3>>& peers) {
            std::vector<PeerProcess> processes;
            for (const auto& [rank, pid, started] : peers) processes.push_back({rank, pid, started});
            live(self.parts()).set_peers(std::move(processes));
          },
          py::arg("peers"),
          "Other ranks of this host, as (rank, pid, start time), so that errors can report dead ones.")
      .def("note_failure", of(&live, &LiveStatus::note_failure), py::arg("text"),
           "Text to add to the next TransportError.")
      .def("with_failure_note", of(&live, &LiveStatus::with_note), py::arg("text"), NoGil(),
           "The text with the noted failure, which is cleared, and dead ranks, which it briefly looks for.")
      .def(
          "begin_wait",
          [](Reducer& self, std::string what) { return live(self.parts()).begin_wait(std::move(what), -1); },
          py::arg("what"),
          "The training thread starts waiting for something other than a bucket. Returns the wait's number.")
      .def("end_wait", of(&live, &LiveStatus::end_wait), py::arg("number"))
      .def("last_error", of(&live, &LiveStatus::error),
           "The error of the last failed step or check; empty if none failed.");
}

void bind_times(py::module_& m, PyReducer& c) {
  py::class_<timeline::Event>(
      m, "Event", "One event of a step: kind, id (a parameter, a bucket or a step) and time_ns of the steady clock.")
      .def_property_readonly("kind", [](const timeline::Event& event) { return name_of(event.kind); })
      .def_readonly("id", &timeline::Event::id)
      .def_readonly("time_ns", &timeline::Event::time_ns);
  c.def("get_backward_stats", of(&Parts::events, &StepEvents::ready_times_ns), NoGil(),
        "Nanoseconds from the start of backward until each gradient was ready, by parameter index; zeros unless these "
        "are recorded or the timeline is on.")
      .def("grad_ready_order", of(&Parts::step, &Step::ready_order),
           "Parameter indices in the order in which gradients last became ready.")
      .def_property_readonly("finished_steps", [](Reducer& self) { return self.parts().events.stats().finished; })
      .def_property_readonly(
          "steps_of_group",
          [](Reducer& self) { return self.parts().events.stats().finished + self.parts().events.stats().matched; },
          "Synchronized backwards that the ranks have finished together: equal on all ranks, also under join().")
      .def("stats", &stats_dict, "Times of the last step in ns, and averages, under torch's names.")
      .def(
          "take_bucket_times",
          [](Reducer& self) {
            auto times = self.parts().events.take_bucket_times();
            return std::tuple(times.steps, std::move(times.of_buckets));
          },
          "Sums over the steps since the last call: their number, and by bucket, in ns, the time from the end of the "
          "last step until it was packed, and the wait for its averages.")
      .def("traffic", &traffic_dict,
           "Traffic of the last finished step's gradients: transport -> (payload bytes, wire bytes or None).")
      .def("record_ready_times", of(&Parts::events, &StepEvents::record_ready_times), py::arg("record"),
           "Record ready times without the timeline's events; on a CUDA device with the device's clock.")
      .def("forward_ns", of(&Parts::events, &StepEvents::forward_ns), NoGil(),
           "Nanoseconds from the start of forward to the first gradient in the last recorded step.")
      .def("set_overlap", of(&Parts::queue, &LaunchQueue::set_overlap), py::arg("overlap"),
           "Off: no bucket is launched before the last gradient is ready. Must be the same on every rank.")
      .def("enable_timeline", of(&Parts::events, &StepEvents::enable_timeline), py::arg("capacity"))
      .def("disable_timeline", of(&timeline_of, &timeline::Timeline::disable))
      .def("timeline", of(&timeline_of, &timeline::Timeline::snapshot), "Events of the last steps, oldest first.")
      .def("timeline_dropped", of(&timeline_of, &timeline::Timeline::dropped));
}

void bind_gradients(PyReducer& c) {
  c.def("_get_local_used_map", of(&Parts::used, &UsedParams::map), NoGil())
      .def("meet_sink", &Reducer::meet_sink)
      .def("records_graph", of(&Parts::static_graph, &StaticGraph::recording))
      .def("graph_has_been_static", of(&Parts::used, &UsedParams::have_been_static))
      .def("unused_bytes", of(&Parts::used, &UsedParams::unused_bytes))
      .def("gradient_stats", &gradient_stats,
           "Of the last synchronized backward: one row per bucket, {sum of squares, number of non-finite values}.")
      .def("nonfinite", &nonfinite_tuples, NoGil(),
           "This rank's infinite or NaN gradients in the last run of consecutive steps with any: (step, parameter "
           "index, elements or -1), the first per parameter.")
      .def("nonfinite_version", of(&Parts::non_finite, &NonFiniteWatch::version), NoGil(),
           "Increases when nonfinite() changes.")
      .def("note_gradients", of(&Parts::changes, &GradientChanges::note_next),
           "Record the next step's averages for changed_gradients().")
      .def("changed_gradients", &changed_gradients, NoGil(),
           "By parameter, once: 0 if its gradient is unchanged since it was recorded, 1: changed in place, 2: None, 3: "
           "another tensor. Empty if none were recorded or a step is running.");
}

void bind_buckets(PyReducer& c) {
  c.def_property_readonly("plan", of(&Parts::layout, &BucketLayout::plan))
      .def_property_readonly("is_in_graph", of(&Parts::keeper, &PlanKeeper::is_in_graph),
                             "Whether a captured CUDA graph holds the buckets, which therefore can't change.")
      .def_property_readonly("has_rebuilt_buckets", of(&Parts::keeper, &PlanKeeper::has_rebuilt))
      .def_property_readonly("transport",
                             [](Reducer& self) { return no_gil(self.parts().context.current_transport()); })
      .def_property_readonly("transport_name",
                             [](Reducer& self) { return self.parts().context.current_transport()->name(); })
      .def_property_readonly("bucket_memory_bytes", of(&Parts::layout, &BucketLayout::memory_bytes));
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
  bind_status(c);
  bind_times(m, c);
  bind_gradients(c);
  bind_buckets(c);
  bind_torch_names(c);
}

}  // namespace torchddp::bindings
