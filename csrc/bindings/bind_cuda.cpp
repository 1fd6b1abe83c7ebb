// What Python needs to set up NCCL. In a build without CUDA everything exists and raises an error that says so.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "common/errors.h"
#include "transport/cuda/cuda_device.h"
#include "transport/nccl/nccl_transport.h"

namespace torchddp::bindings {
namespace {

using namespace transport;

std::shared_ptr<gpu::Nccl> require_nccl(int device_index) {
  auto nccl = nccl_library(device_index);
  if (nccl == nullptr) {
    throw std::runtime_error(
        "this torchddp was built without CUDA: install the wheel for your CUDA version, or build "
        "with TORCHDDP_CUDA=1");
  }
  return nccl;
}

py::object nccl_versions() {
  const auto nccl = nccl_library(0);
  return nccl == nullptr ? py::none() : py::object(py::make_tuple(nccl->version(), nccl->built_version()));
}

py::bytes make_nccl_id() {
  const auto nccl = require_nccl(0);
  gpu::UniqueId id;
  int result = gpu::kNcclSuccess;
  {
    const py::gil_scoped_release release;
    result = nccl->make_id(&id);
  }
  if (result != gpu::kNcclSuccess) {
    throw torchddp::TransportError("NCCL could not create an id: " + nccl->describe(result, nullptr));
  }
  return {id.bytes.data(), id.bytes.size()};
}

std::vector<std::string> nccl_settings() {
  const auto nccl = nccl_library(0);
  auto names = nccl == nullptr ? std::vector<std::string>() : nccl->known_numbers();
  names.emplace_back("net_name");
  return names;
}

std::shared_ptr<NcclTransport> connect_nccl(const std::string& id, int rank, int size, int device_index,
                                            std::map<std::string, int> settings, std::string net_name,
                                            bool high_priority, bool sums_in_place,
                                            std::chrono::milliseconds connect_timeout,
                                            std::chrono::milliseconds timeout) {
  auto nccl = require_nccl(device_index);
  gpu::UniqueId given;
  if (id.size() != given.bytes.size()) {
    throw std::invalid_argument("an NCCL id has " + std::to_string(given.bytes.size()) + " bytes, got " +
                                std::to_string(id.size()));
  }
  std::ranges::copy(id, given.bytes.begin());
  const gpu::CommunicatorConfig config{.rank = rank,
                                       .size = size,
                                       .connect_timeout = connect_timeout,
                                       .settings = {std::move(settings), std::move(net_name)},
                                       .high_priority = high_priority};
  const py::gil_scoped_release release;
  auto communicator =
      std::make_shared<gpu::Communicator>(std::move(nccl), device_of(gpu_at(device_index)), config, given);
  return no_gil(std::make_shared<NcclTransport>(std::move(communicator), gpu_at(device_index), timeout, sums_in_place));
}

// A communicator shared by transports; it ends with the last of them.
struct SharedNccl {
  std::weak_ptr<gpu::Communicator> communicator;
  at::Device device;
  bool sums_in_place;

  std::shared_ptr<NcclTransport> open(std::chrono::milliseconds timeout) const {
    auto shared = communicator.lock();
    if (shared == nullptr || shared->is_broken()) return nullptr;
    return no_gil(std::make_shared<NcclTransport>(std::move(shared), device, timeout, sums_in_place));
  }
  void leave() const {
    if (const auto shared = communicator.lock()) shared->leave();
  }
};

}  // namespace

void bind_cuda(py::module_& m) {
  m.def("nccl_versions", &nccl_versions,
        "The loaded NCCL version and the one this was built with, as 22907 for 2.29.7; None without CUDA.");
  m.def("nccl_version_problem", &gpu::version_problem, py::arg("running"), py::arg("built"),
        "Why the loaded NCCL can't be used; empty if it can.");
  m.def("device_identity", &device_identity, py::arg("device_index"), NoGil(),
        "Identifies a CUDA device across all hosts; empty without CUDA.");
  m.def("nccl_settings", &nccl_settings, "torch's names of the ncclConfig_t fields that this build can set.");
  m.def("make_nccl_id", &make_nccl_id, "The 128-byte id that one rank creates and all ranks of a communicator use.");
  py::class_<SharedNccl>(m, "SharedNccl", "The communicator of NcclTransports; keeps none of them alive.")
      .def("open", &SharedNccl::open, py::arg("timeout"), NoGil(),
           "Another transport over it; None if it is gone or broken. Not collective.")
      .def(
          "leave", &SharedNccl::leave, NoGil(),
          "End it while the driver is still there; later operations raise TransportError. Takes some seconds at most.");
  py::class_<NcclTransport, Transport, std::shared_ptr<NcclTransport>>(
      m, "NcclTransport", "NCCL on a stream of its own, for CUDA tensors of one device.")
      .def(py::init(&connect_nccl), py::arg("id"), py::kw_only(), py::arg("rank"), py::arg("size"),
           py::arg("device_index"), py::arg("settings"), py::arg("net_name"), py::arg("high_priority"),
           py::arg("sums_in_place"), py::arg("connect_timeout"), py::arg("timeout"),
           "Collective among the ranks with this id. sums_in_place: whether it may reduce large gradients where they "
           "are, equal on all ranks. TransportError if a rank is missing or NCCL fails.")
      .def_property_readonly(
          "shared",
          [](const NcclTransport& self) {
            return SharedNccl{self.communicator(), self.device(), self.capabilities().sums_in_place};
          },
          "Its communicator, for other transports.");
}

}  // namespace torchddp::bindings
