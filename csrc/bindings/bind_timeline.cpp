#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "timeline/timeline.h"

namespace torchddp::bindings {
namespace {

const char* kind_name(timeline::EventKind kind) {
  using timeline::EventKind;
  switch (kind) {
    case EventKind::kForwardBegin:
      return "forward_begin";
    case EventKind::kBackwardBegin:
      return "backward_begin";
    case EventKind::kGradReady:
      return "grad_ready";
    case EventKind::kPacked:
      return "packed";
    case EventKind::kLaunched:
      return "launched";
    case EventKind::kWaitBegin:
      return "wait_begin";
    case EventKind::kDone:
      return "done";
    case EventKind::kBackwardEnd:
      return "backward_end";
  }
  return "unknown";
}

}  // namespace

void bind_timeline(py::module_& m) {
  using timeline::Event;
  py::class_<Event>(m, "Event",
                    "One event of a step: kind, id (a parameter, a bucket or a step) and time_ns of the steady clock.")
      .def_property_readonly("kind", [](const Event& event) { return kind_name(event.kind); })
      .def_readonly("id", &Event::id)
      .def_readonly("time_ns", &Event::time_ns);
}

}  // namespace torchddp::bindings
