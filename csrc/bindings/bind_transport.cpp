#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings/bindings.h"
#include "common/errors.h"
#include "common/signals.h"
#include "shm/errors.h"
#include "shm_backend/backend.h"
#include "transport/c10d/c10d_transport.h"
#include "transport/c10d/group_work.h"
#include "transport/shm/shm_transport.h"
#include "transport/tensor_broadcast.h"

namespace torchddp::bindings {
namespace {

using namespace transport;
using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// A method that starts the collective `make` builds from its arguments. Waiting in the same call is faster than a second call.
template <typename... Arguments>
auto starter(Collective (*make)(Arguments...)) {
  return [make](Transport& self, Arguments... arguments, Work& work, bool wait) {
    self.start(make(arguments...), work);
    if (wait) work.wait();
  };
}

void bind_interface(py::module_& m) {
  const auto waits = py::arg("wait") = false;
  py::class_<Work, std::shared_ptr<Work>>(m, "Work", "The restartable handle of a collective; see Transport.make_work.")
      .def("poll", &Work::poll, NoGil(), "True when no operation is running. Never blocks.")
      .def(
          "wait", [](Work& work) { work.wait(kTransportTimeout); }, NoGil())  // converting a default argument is slow
      .def("wait", &Work::wait, py::arg("timeout"), NoGil(),
           "Block until the result may be used. TransportError if a peer died or `timeout` has passed.")
      .def("abandon", &Work::abandon, NoGil(), "Drop an operation that failed.");

  py::class_<Transport, std::shared_ptr<Transport>>(
      m, "Transport",
      "Collectives on flat memory; all methods but the properties, allocate and make_work are collective.")
      .def_property_readonly("name", &Transport::name)
      .def_property_readonly("rank", &Transport::rank)
      .def_property_readonly("size", &Transport::size)
      .def_property_readonly("reaches_any_memory",
                             [](const Transport& self) { return self.capabilities().reaches_any_memory; })
      .def_property_readonly(
          "traffic", [](const Transport& self) { return to_dict(self.traffic()); },
          "Traffic of all operations so far, by route: name -> (payload bytes, wire bytes).")
      .def(
          "allocate",
          [](Transport& transport, int64_t numel, const at::Tensor& like) {
            return transport.allocate(numel, like.scalar_type(), like.device());
          },
          py::arg("numel"), py::arg("like"), NoGil(),
          "1-d memory with `numel` elements of the dtype and device of `like`.")
      .def("make_work", [](Transport& transport) { return no_gil(std::shared_ptr<Work>(transport.make_work())); })
      .def("all_reduce", starter(+[](const at::Tensor& tensor) { return Collective::all_reduce(tensor); }),
           py::arg("tensor"), py::arg("work"), waits, NoGil())
      .def("reduce", starter(+[](const at::Tensor& tensor, int root) { return Collective::reduce(tensor, root); }),
           py::arg("tensor"), py::arg("root"), py::arg("work"), waits, NoGil())
      .def("reduce_scatter", starter(&Collective::reduce_scatter), py::arg("output"), py::arg("input"), py::arg("work"),
           waits, NoGil())
      .def("all_gather", starter(&Collective::all_gather), py::arg("output"), py::arg("input"), py::arg("work"), waits,
           NoGil())
      .def("broadcast", starter(&Collective::broadcast), py::arg("tensor"), py::arg("root"), py::arg("work"), waits,
           NoGil())
      .def("barrier", starter(&Collective::barrier), py::arg("work"), waits, NoGil())
      .def("interrupt", &Transport::interrupt, py::arg("reason"), NoGil(),
           "From any thread, not collective: current waits and all later operations raise TransportError(reason).");

  m.def(
      "wait_for_work",
      [](const c10::intrusive_ptr<c10d::Work>& work, const ProcessGroupPtr& group) {
        try {
          return is_gloo(*group) ? wait_interruptibly(*work, group, Interruption()) : work->wait();
        } catch (const SignalInterrupt&) {
          throw;
        } catch (const py::error_already_set&) {
          throw;  // by a Work that is written in Python
        } catch (const std::exception& error) {
          throw TransportError(transport::reason_of(error));
        }
      },
      py::arg("work"), py::arg("process_group"), NoGil(),
      "Like work.wait(), for an operation of this group; over gloo with signal handlers. TransportError if it failed.");
  m.def(
      "agree_on_memory",
      [](const std::shared_ptr<Transport>& transport, std::chrono::milliseconds timeout) {
        auto agreed = [&] {
          const py::gil_scoped_release release;
          return agree_on_memory(transport, timeout);
        }();
        return agreed == transport ? transport : no_gil(std::move(agreed));
      },
      py::arg("transport"), py::arg("timeout"),
      "The transport, or its fallback on all ranks if any rank lacked memory. Collective if the transport may lack "
      "memory.");

  py::class_<TensorBroadcast, std::shared_ptr<TensorBroadcast>>(m, "TensorBroadcast",
                                                                "Broadcasts many tensors in few messages.")
      .def(py::init([](std::shared_ptr<Transport> transport, int64_t message_bytes, std::chrono::milliseconds timeout) {
             return no_gil(std::make_shared<TensorBroadcast>(std::move(transport), message_bytes, timeout));
           }),
           py::arg("transport"), py::arg("message_bytes"), py::arg("timeout"))
      .def("reserve", &TensorBroadcast::reserve, py::arg("tensors"), NoGil(),
           "Reserve the memory that run() needs for these tensors. Not collective.")
      .def("run", &TensorBroadcast::run, py::arg("tensors"), py::arg("root"), NoGil(),
           "Copy rank `root`'s tensors to all ranks. Collective.");
}

void bind_transports(py::module_& m) {
  py::class_<C10dTransport, Transport, std::shared_ptr<C10dTransport>>(m, "C10dTransport",
                                                                       "Through a torch.distributed process group.")
      .def(py::init([](ProcessGroupPtr group) { return no_gil(std::make_shared<C10dTransport>(std::move(group))); }),
           py::arg("process_group"));

  py::register_exception<shm::Unavailable>(m, "SharedMemoryUnavailable", PyExc_RuntimeError);
  py::class_<ShmTransport, Transport, std::shared_ptr<ShmTransport>>(m, "ShmTransport")
      .def("leave", [](ShmTransport& self, const std::string& reason) { self.engine().interrupt(reason); }, NoGil());
  py::class_<ShmMeeting, std::shared_ptr<ShmMeeting>>(m, "ShmMeeting",
                                                      "What the transports of one process group share.")
      .def(py::init([] { return no_gil(std::make_shared<ShmMeeting>()); }));
  py::class_<ShmEndpoint>(m, "ShmEndpoint", "A rank's socket, at which the ranks of its host can reach it.")
      .def(py::init<int64_t, std::shared_ptr<ShmMeeting>>(), py::arg("limit_bytes"), py::arg("meeting") = nullptr)
      .def_property_readonly("address", &ShmEndpoint::address)
      .def_property_readonly(
          "offer",
          [](const ShmEndpoint& self) {
            const auto offer = self.offer();
            return py::make_tuple(offer.mesh, offer.end.number, offer.end.header, offer.is_shared);
          },
          "Its part in memory that the ranks share already.")
      .def(
          "connect",
          [](ShmEndpoint& self, std::optional<ProcessGroupPtr> group, std::vector<int> local_ranks,
             std::vector<std::string> addresses, std::optional<ProcessGroupPtr> outer_group, std::vector<int> places,
             std::vector<int> outer_ranks, int owners, bool spans, std::chrono::milliseconds connect_timeout,
             std::chrono::milliseconds timeout,
             const std::vector<std::tuple<std::string, int, int64_t, bool>>& offers) {
            const py::gil_scoped_release release;
            std::vector<ShmOffer> offered;
            for (const auto& [mesh, number, header, is_shared] : offers) {
              offered.push_back({mesh, {number, header}, is_shared});
            }
            return no_gil(
                self.connect(group.value_or(ProcessGroupPtr()),
                             {std::move(local_ranks), std::move(addresses), outer_group.value_or(ProcessGroupPtr()),
                              std::move(places), std::move(outer_ranks), owners, spans},
                             offered, connect_timeout, timeout));
          },
          py::arg("process_group"), py::kw_only(), py::arg("local_ranks"), py::arg("addresses"), py::arg("outer_group"),
          py::arg("places"), py::arg("outer_ranks"), py::arg("owners"), py::arg("spans"), py::arg("connect_timeout"),
          py::arg("timeout"), py::arg("offers") = std::vector<std::tuple<std::string, int, int64_t, bool>>(),
          "Collective among the ranks of a host. Raises SharedMemoryUnavailable with the reason if they can't share "
          "memory.");
  m.def(
      "make_shm_backend",
      [](std::shared_ptr<ShmTransport> transport, c10::intrusive_ptr<c10d::Backend> gloo,
         std::chrono::milliseconds timeout) {
        return c10::intrusive_ptr<c10d::Backend>(
            c10::make_intrusive<shm_backend::ShmBackend>(std::move(transport), std::move(gloo), timeout));
      },
      py::arg("transport"), py::arg("gloo"), py::arg("timeout"), NoGil(),
      "The backend of a process group whose ranks share memory. `gloo`, of the same ranks, does the rest.");
  m.def("timeout_of", &transport::timeout_of, py::arg("group"), py::arg("device"), "How long its operations may take.");
  m.def("host_identity", &shm::host_identity, "Equal for processes that can share memory with each other.");
}

}  // namespace

py::dict to_dict(const transport::Traffic& traffic) {
  using namespace transport;
  py::dict result;
  for (size_t i = 0; i < kNumRoutes; ++i) {
    if (const auto& route = traffic.routes[i]; route != RouteBytes{}) {
      result[kRouteNames[i]] = py::make_tuple(route.payload_bytes, route.wire_bytes);
    }
  }
  return result;
}

void bind_transport(py::module_& m) {
  bind_interface(m);
  bind_transports(m);
}

}  // namespace torchddp::bindings
