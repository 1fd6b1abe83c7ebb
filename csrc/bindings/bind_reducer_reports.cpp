// The Reducer's Python surface: its reports.
#include <pybind11/stl.h>

#include <array>

#include "bindings/bind_reducer.h"
#include "common/check.h"

namespace torchddp::bindings {
namespace {

using namespace reducer;

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
  for (const auto change : self.parts().changes.take()) {
    result.push_back(static_cast<int64_t>(change));
  }
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
            for (const auto& [rank, pid, started] : peers) {
              processes.push_back({rank, pid, started});
            }
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
          [](Reducer& self) {
            const auto& stats = self.parts().events.stats();
            return stats.finished + stats.matched;
          },
          "Synchronized backwards that the ranks have finished together: equal on all ranks, also under join().")
      .def("stats", &stats_dict, "Times of the last step in ns, and averages, under torch's names.")
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

}  // namespace

void bind_reducer_reports(py::module_& m, PyReducer& c) {
  bind_status(c);
  bind_times(m, c);
  bind_gradients(c);
  bind_buckets(c);
}

}  // namespace torchddp::bindings
