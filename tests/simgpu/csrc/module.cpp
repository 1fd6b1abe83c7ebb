// The Python module torchddp._simulated: what tests ask of the simulated GPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "machine.h"
#include "nccl.h"

namespace py = pybind11;
using torchddp::sim::Machine;
using torchddp::sim::SimulatedNccl;

PYBIND11_MODULE(_simulated, m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def(
      "start_over", [](uint64_t seed, int late) { Machine::here().start_over(seed, late); }, py::arg("seed"),
      py::arg("late"), NoGil(), "Forget all reports. `late`: of 100 values, how many are written late.");
  m.def(
      "leave_out", [](std::string place) { Machine::here().leave_out(std::move(place)); }, py::arg("place"), NoGil(),
      "Records or waits at this place do nothing from now on.");
  m.def(
      "set_defect", [](std::string name) { Machine::here().set_defect(std::move(name)); }, py::arg("name"), NoGil(),
      "The device or NCCL behaves as a faulty program would make it.");
  m.def("order", [] { return Machine::here().order(); }, "A hash of the order in which everything ran.");
  m.def(
      "places", [] { return Machine::here().places(); }, "Where events were recorded and waited for, with how often.");
  m.def("races", [] { return Machine::here().races(); }, "Accesses to the same memory that nothing orders.");
  m.def("broken_rules", [] { return SimulatedNccl::here()->broken_rules(); }, "NCCL's rules that were broken.");
  m.def("operations", [] { return Machine::here().operations(); }, "How many were queued.");
  m.def(
      "begin_capture", [] { Machine::here().begin_capture(Machine::here().current_stream()); }, NoGil(),
      "From now on the current stream records a graph.");
  m.def("end_capture", [] { return Machine::here().end_capture(); }, NoGil(), "The number of the graph.");
  m.def(
      "replay", [](size_t graph) { Machine::here().replay(graph, Machine::here().current_stream()); }, py::arg("graph"),
      NoGil(), "Queue the graph's operations on the current stream.");
  m.def(
      "captures", [] { return Machine::here().captures(Machine::here().current_stream()); },
      "Whether the current stream records a graph.");
  m.def("synchronize", [] { Machine::here().synchronize(); }, NoGil(), "Wait until the device is idle.");
}
