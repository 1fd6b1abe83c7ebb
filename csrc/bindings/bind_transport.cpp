#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <pybind11/chrono.h>

#include "bindings/bindings.h"
#include "transport/factory.h"

namespace torchddp::bindings {

void bind_transport(py::module_& m) {
  using namespace transport;
  py::class_<Work>(m, "Work", "The restartable handle of a collective; see Transport.make_work.")
      .def("poll", &Work::poll, NoGil(), "True when nothing is under way. Never blocks.")
      .def("wait", &Work::wait, py::arg("timeout") = kTransportTimeout, NoGil(),
           "Blocks until the result may be used; TransportError when a peer is gone or `timeout` has passed.")
      .def("abandon", &Work::abandon, NoGil(), "Forgets an operation that failed.");

  py::class_<Transport, std::shared_ptr<Transport>>(
      m, "Transport",
      "Collectives on flat memory; all methods but the properties, allocate and make_work are collective.")
      .def_property_readonly("name", &Transport::name)
      .def_property_readonly("rank", &Transport::rank)
      .def_property_readonly("size", &Transport::size)
      .def(
          "allocate",
          [](Transport& transport, int64_t numel, const at::Tensor& like) {
            return transport.allocate(numel, like.scalar_type(), like.device());
          },
          py::arg("numel"), py::arg("like"), NoGil(),
          "1-d memory with `numel` elements of the dtype and device of `like`.")
      .def("make_work", &Transport::make_work)
      .def("all_reduce", &Transport::all_reduce, py::arg("tensor"), py::arg("work"), NoGil())
      .def("reduce_scatter", &Transport::reduce_scatter, py::arg("output"), py::arg("input"), py::arg("work"), NoGil())
      .def("all_gather", &Transport::all_gather, py::arg("output"), py::arg("input"), py::arg("work"), NoGil())
      .def("broadcast", &Transport::broadcast, py::arg("tensor"), py::arg("root"), py::arg("work"), NoGil());

  m.def("open_transport", &open_transport, py::arg("choice"), py::arg("process_group"),
        "The transport of a process group. choice: 'auto' or 'c10d'.");
}

}  // namespace torchddp::bindings
