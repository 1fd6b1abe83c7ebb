// The Reducer's Python surface. Underscored names are torch's: its DDP module, join hooks and communication hooks call them.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <array>

#include "bindings/bindings.h"
#include "bucket/flat_view.h"
#include "reducer/backward_watch.h"
#include "reducer/reducer.h"

namespace torchddp::bindings {
namespace {

using reducer::Reducer;
using FuturePtr = std::shared_ptr<torch::jit::PythonFutureWrapper>;
using PyReducer = py::class_<Reducer, std::shared_ptr<Reducer>>;

std::shared_ptr<Reducer> make_reducer(std::vector<at::Tensor> params, std::vector<plan::ParamSpec> specs,
                                      c10::intrusive_ptr<c10d::ProcessGroup> group,
                                      std::shared_ptr<transport::Transport> transport, std::vector<int64_t> caps_bytes,
                                      int64_t alignment_bytes, int64_t solo_bytes, bool find_unused_parameters,
                                      bool gradient_as_bucket_view, bool gradients_share_storage,
                                      bool skip_all_reduce_unused_params, bool compiled_autograd_takes_over,
                                      py::object wire_dtype, py::object reduce_dtype, bool gradient_stats,
                                      bool find_nonfinite, bool raise_nonfinite, bool pack_whole_buckets, std::chrono::milliseconds timeout) {
  reducer::ReducerConfig config;
  config.limits = {std::move(caps_bytes), alignment_bytes, solo_bytes};
  config.find_unused_parameters = find_unused_parameters;
  config.gradient_as_bucket_view = gradient_as_bucket_view;
  config.view_storage = gradients_share_storage ? bucket::ViewStorage::kBucket : bucket::ViewStorage::kOwn;
  config.skip_all_reduce_unused_params = skip_all_reduce_unused_params;
  config.compiled_autograd_takes_over = compiled_autograd_takes_over;
  if (!wire_dtype.is_none()) {
    config.wire_dtype = reinterpret_cast<THPDtype*>(wire_dtype.ptr())->scalar_type;
  }
  if (!reduce_dtype.is_none()) {
    config.reduce_dtype = reinterpret_cast<THPDtype*>(reduce_dtype.ptr())->scalar_type;
  }
  config.gradient_stats = gradient_stats;
  config.find_non_finite = find_nonfinite;
  config.raise_non_finite = raise_nonfinite;
  config.pack_whole_buckets = pack_whole_buckets;
  config.timeout = timeout;
  const py::gil_scoped_release release;
  return no_gil(std::make_shared<Reducer>(std::move(params), std::move(specs), std::move(group), std::move(transport),
                                          std::move(config)));
}

py::dict traffic_dict(const Reducer& self) {
  const auto& last = self.stats().last;
  auto result = to_dict(last.traffic);
  if (last.hook_bytes > 0) {
    result["hook"] = py::make_tuple(last.hook_bytes, py::none());
  }
  return result;
}

std::vector<std::tuple<int64_t, int64_t, int64_t>> nonfinite_tuples(Reducer& self) {
  std::vector<std::tuple<int64_t, int64_t, int64_t>> result;
  for (const auto& found : self.non_finite()) {
    result.emplace_back(found.step, found.param, found.count);
  }
  return result;
}

py::dict stats_dict(const Reducer& self) {
  const auto& stats = self.stats();
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

const char* name_of(bucket::BucketState state) {
  constexpr std::array<const char*, 6> kNames = {"idle", "filling", "ready", "in flight", "skipped", "reduced"};
  return kNames.at(static_cast<size_t>(state));
}

const char* name_of(const reducer::Status& status) {
  constexpr std::array<const char*, 3> kNames = {"idle", "forward", "backward"};
  return status.waits ? "waiting" : kNames.at(static_cast<size_t>(status.phase));
}

const char* name_of(reducer::BackwardEnd end) {
  constexpr std::array<const char*, 4> kNames = {"none", "running", "ended", "failed"};
  return kNames.at(static_cast<size_t>(end));
}

py::dict status_dict(const Reducer& self) {
  reducer::Status status;
  {
    const py::gil_scoped_release release;
    status = self.status();
  }
  py::list buckets;
  for (const auto& bucket : status.buckets) {
    py::list missing;
    for (const auto param : bucket.missing) {
      missing.append(self.specs()[static_cast<size_t>(param)].name);
    }
    py::dict entry;
    entry["state"] = name_of(bucket.state);
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
  result["backward"] = name_of(status.backward);
  result["backward_error"] = status.backward_error;
  result["error"] = status.error;
  return result;
}

std::string python_type_name(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const python_error& raised) {
    const py::gil_scoped_acquire gil;
    return raised.type == nullptr ? "" : py::str(py::handle(raised.type).attr("__name__"));
  } catch (...) {
    return "";
  }
}

void bind_status(PyReducer& c) {
  reducer::set_error_type_name(&python_type_name);
  c.def("_status", &status_dict, "Where the step is; from any thread, at any time. See docs/hang_reports.md.")
      .def(
          "_set_peers",
          [](Reducer& self, const std::vector<std::array<int64_t, 3>>& peers) {
            std::vector<reducer::PeerProcess> processes;
            for (const auto& [rank, pid, started] : peers) {
              processes.push_back({rank, pid, started});
            }
            self.live_status().set_peers(std::move(processes));
          },
          py::arg("peers"), "Other ranks of this host, as (rank, pid, start time): errors tell which are gone.")
      .def(
          "_note_failure", [](Reducer& self, const std::string& text) { self.live_status().note_failure(text); },
          py::arg("text"), "What the next TransportError is to tell besides.")
      .def(
          "_with_failure_note",
          [](Reducer& self, std::string text) { return self.live_status().with_note(std::move(text)); },
          py::arg("text"), NoGil(),
          "The text, and what was noted, which is forgotten. Looks for a while which ranks are gone.")
      .def(
          "_begin_wait",
          [](Reducer& self, std::string what) { return self.live_status().begin_wait(std::move(what), -1); },
          py::arg("what"),
          "The training thread waits from now on, for something that is no bucket: the number of this wait.")
      .def("_end_wait", [](Reducer& self, int64_t number) { self.live_status().end_wait(number); }, py::arg("number"));
}

void bind_step(PyReducer& c) {
  c.def("prepare_for_forward", &Reducer::begin_forward, NoGil())
      .def(
          "prepare_for_backward",
          [](Reducer& self, const std::vector<at::Tensor>& outputs) { self.prepare_for_backward(outputs); },
          py::arg("output"), NoGil())
      .def(
          "prepare_for_backward",
          [](Reducer& self, const at::Tensor& output) { self.prepare_for_backward({&output, 1}); }, py::arg("output"),
          NoGil())
      .def(
          "_autograd_hook", [](Reducer& self, int64_t index) { self.on_grad_ready(index, nullptr); }, py::arg("index"),
          NoGil())
      .def("_delay_all_reduce", &Reducer::delay_all_reduce, NoGil())
      .def("_reduce_now", &Reducer::reduce_now, NoGil())
      .def("_averages", &Reducer::averages,
           "Per parameter: whether its gradient is an average that this rank alone has.")
      .def("_set_averages", &Reducer::set_averages, py::arg("averages"))
      .def("_check_reducer_finalized", &Reducer::check_finalized, NoGil())
      .def("_rebuild_buckets", &Reducer::rebuild_buckets, NoGil())
      .def("_adopt_plan", &Reducer::adopt_plan, py::arg("plan"), NoGil())
      .def("_push_all_rebuilt_params", &Reducer::push_rebuilt_params_for_all_indices, NoGil())
      .def("_get_zeros_like_grad_buckets", &Reducer::zero_grad_buckets, NoGil());
}

void bind_modes(PyReducer& c) {
  c.def("_set_static_graph", &Reducer::set_static_graph, NoGil())
      .def(
          "_register_comm_hook",
          [](Reducer& self, py::object state, py::object hook) {
            self.register_comm_hook(std::make_unique<c10d::PythonCommHook>(std::move(state), std::move(hook)));
          },
          py::arg("state"), py::arg("hook"))
      .def("_register_builtin_comm_hook", &Reducer::register_builtin_comm_hook, py::arg("comm_hook_type"))
      .def(
          "_run_comm_hook",
          [](Reducer& self, c10d::GradBucket& bucket) -> FuturePtr {
            return std::make_shared<torch::jit::PythonFutureWrapper>(self.run_comm_hook(bucket));
          },
          py::arg("bucket"), NoGil())
      .def(
          "_run_allreduce_hook",
          [](Reducer& self, c10d::GradBucket& bucket) -> FuturePtr {
            return std::make_shared<torch::jit::PythonFutureWrapper>(self.run_allreduce_hook(bucket));
          },
          py::arg("bucket"), NoGil())
      .def(
          "_install_post_backward_futures",
          [](Reducer& self, const std::vector<FuturePtr>& futures) {
            c10::List<c10::intrusive_ptr<c10::ivalue::Future>> list(c10::FutureType::create(c10::TensorType::get()));
            for (const auto& future : futures) {
              list.push_back(future->fut);
            }
            self.install_futures(list);
          },
          py::arg("futures"))
      .def("_set_forward_pass_work_handle", &Reducer::set_forward_pass_work_handle, py::arg("work"),
           py::arg("use_static_world_size"))
      .def("_set_divisor", &Reducer::set_divisor, py::arg("divisor"),
           "`divisor()` says in each backward over how many ranks gradients are averaged.")
      .def("_set_optimizer_in_backward", &Reducer::set_optimizer_in_backward)
      .def(
          "_set_mixed_precision_param_dtype",
          [](Reducer& self, py::object dtype) {
            self.set_mixed_precision_param_dtype(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
          },
          py::arg("dtype"))
      .def("_set_sparse_metadata", &Reducer::set_sparse_metadata, py::arg("global_unique_ids"))
      .def("_disable_views", &Reducer::disable_views)
      .def("_remove_autograd_hooks", &Reducer::remove_autograd_hooks, NoGil())
      .def("_update_process_group", &Reducer::update_process_group, py::arg("new_process_group"),
           py::arg("transport").none(false), NoGil())
      .def("_match_used_map", &Reducer::match_used_map, NoGil())
      .def("_reset_state", &Reducer::reset_state, NoGil());
}

void bind_reports(PyReducer& c) {
  c.def("get_backward_stats", &Reducer::backward_stats, NoGil(),
        "Nanoseconds from the start of backward until each gradient was ready, by parameter index; zeros unless they "
        "are recorded or the timeline is on.")
      .def("_get_local_used_map", &Reducer::local_used_map, NoGil())
      .def("_ddp_graph_static", &Reducer::graph_has_been_static)
      .def("_grad_ready_order", &Reducer::grad_ready_order)
      .def("_gradient_stats", &Reducer::gradient_stats)
      .def(
          "_nonfinite", &nonfinite_tuples, NoGil(),
          "Of the last steps in a row with infinite or NaN gradients of this rank: (step, parameter index, elements or "
          "-1), of each parameter the first.")
      .def("_nonfinite_version", &Reducer::non_finite_version, NoGil(), "Grows with what _nonfinite tells.")
      .def_property_readonly("_finished_steps", [](const Reducer& self) { return self.stats().finished; })
      .def("_last_error", &Reducer::last_error)
      .def("_unused_bytes", &Reducer::unused_bytes)
      .def("_stats", &stats_dict, "Times of the last step in ns, and averages, under torch's names.")
      .def("_traffic", &traffic_dict,
           "Of the last finished step's gradients: transport -> (bytes given, bytes put on the wire, or None).")
      .def("_record_ready_times", &Reducer::record_ready_times, py::arg("record"))
      .def("_forward_ns", &Reducer::forward_ns, NoGil())
      .def_property_readonly("_in_graph", &Reducer::is_in_graph)
      .def("_set_overlap", &Reducer::set_overlap, py::arg("overlap"))
      .def("_enable_timeline", &Reducer::enable_timeline, py::arg("capacity"))
      .def("_disable_timeline", [](Reducer& self) { self.timeline().disable(); })
      .def(
          "_timeline", [](Reducer& self) { return self.timeline().snapshot(); },
          "Events of the last steps, oldest first.")
      .def("_timeline_dropped", [](Reducer& self) { return self.timeline().dropped(); })
      .def_property_readonly("plan", [](const Reducer& self) { return plan::BucketPlan(self.plan()); })
      .def_property_readonly("_num_layouts", &Reducer::num_layouts)
      .def_property_readonly("transport", [](Reducer& self) { return no_gil(self.transport()); })
      .def_property_readonly("transport_name", [](Reducer& self) { return self.transport()->name(); })
      .def_property_readonly("bucket_memory_bytes", &Reducer::bucket_memory_bytes)
      .def_property_readonly("gradient_as_bucket_view", &Reducer::gradient_as_bucket_view)
      .def_property_readonly("has_rebuilt_buckets", &Reducer::has_rebuilt_buckets);
}

}  // namespace

void bind_reducer(py::module_& m) {
  PyReducer c(m, "Reducer",
              "Packs gradients into buckets and reduces them while autograd runs. Made by DistributedDataParallel.");
  c.def(py::init(&make_reducer), py::arg("params"), py::arg("specs"), py::arg("process_group"),
        py::arg("transport").none(false), py::kw_only(), py::arg("caps_bytes"), py::arg("alignment_bytes") = 1,
        py::arg("solo_bytes") = 0, py::arg("find_unused_parameters") = false, py::arg("gradient_as_bucket_view") = true,
        py::arg("gradients_share_storage") = false, py::arg("skip_all_reduce_unused_params") = false,
        py::arg("compiled_autograd_takes_over") = false, py::arg("wire_dtype") = py::none(),
        py::arg("reduce_dtype") = py::none(), py::arg("gradient_stats") = false, py::arg("find_nonfinite") = false,
        py::arg("raise_nonfinite") = false, py::arg("pack_whole_buckets") = false,
        py::arg("timeout") = transport::kTransportTimeout);
  m.def(
      "finished_steps", [] { return reducer::all_finished_steps.load(std::memory_order_relaxed); },
      "Synchronised backwards that the reducers of this process have finished, those that are gone included.");
  m.def("make_flat_view", &bucket::make_flat_view, py::arg("flat"), py::arg("offset"), py::arg("like"), NoGil(),
        "A tensor like `like` in the memory of `flat` from element `offset` on, with a storage of its own.");
  bind_step(c);
  bind_modes(c);
  bind_reports(c);
  bind_status(c);
}

}  // namespace torchddp::bindings
