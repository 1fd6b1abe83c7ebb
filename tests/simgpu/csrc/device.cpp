// What takes the place of csrc/transport/cuda/ in the simulated build: the reducer runs as on a GPU.
#include "gpu/device.h"

#include <chrono>
#include <memory>

#include "../../cpp/pack_device_loop.h"
#include "machine.h"
#include "nccl.h"
#include "transport/cuda/cuda_device.h"

namespace torchddp::sim {
namespace {

int64_t number(void* handle) { return reinterpret_cast<int64_t>(handle); }
void* handle(int64_t number) { return reinterpret_cast<void*>(number); }

class SimulatedDevice final : public gpu::Device {
 public:
  gpu::Stream current_stream() override { return handle(machine_.current_stream()); }
  gpu::Stream make_stream(bool) override { return handle(machine_.make_stream()); }
  gpu::Event make_event() override { return handle(machine_.make_event()); }
  gpu::Event make_timing_event() override { return make_event(); }
  void record(gpu::Event event, gpu::Stream stream, gpu::Place where) override {
    machine_.record(number(event), number(stream), where);
  }
  void wait(gpu::Stream stream, gpu::Event event, gpu::Place where) override {
    machine_.wait(number(stream), number(event), where);
  }
  bool finished(gpu::Event event) override { return machine_.finished(number(event)); }
  double elapsed_ms(gpu::Event, gpu::Event) override { return 1.0; }
  bool capturing(gpu::Stream stream) override { return machine_.captures(number(stream)); }
  void synchronize(gpu::Event event) override { machine_.synchronize_event(number(event)); }

 private:
  void drop_stream(gpu::Stream stream) noexcept override { machine_.synchronize(number(stream)); }
  void drop_event(gpu::Event event) noexcept override { machine_.destroy_event(number(event)); }

  Machine& machine_ = Machine::here();
};

}  // namespace
}  // namespace torchddp::sim

namespace torchddp::transport {

bool is_gpu(at::Device device) { return device.is_privateuseone(); }
at::Device gpu_at(int index) { return {at::kPrivateUse1, static_cast<c10::DeviceIndex>(index)}; }

std::shared_ptr<gpu::Device> device_of(at::Device device) {
  static auto* const simulated = new std::shared_ptr<gpu::Device>(std::make_shared<sim::SimulatedDevice>());
  return is_gpu(device) ? *simulated : nullptr;
}

std::shared_ptr<gpu::Nccl> nccl_library(int) { return sim::SimulatedNccl::here(); }

std::string device_identity(int) { return "simulated GPU of process " + std::to_string(getpid()); }

bool move_by_kernels(kernels::Direction direction, void* flat, kernels::DType flat_type,
                     std::span<const kernels::DevicePiece> pieces, kernels::DType outside_type, double scale,
                     at::Device device) {
  if (!is_gpu(device)) return false;
  const bool packs = direction == kernels::Direction::kPack;
  std::vector<sim::Range> ranges;
  for (const auto& piece : pieces) {
    auto* const in_flat = static_cast<std::byte*>(flat) + piece.begin * kernels::item_size(flat_type);
    ranges.push_back({in_flat, piece.numel * kernels::item_size(flat_type), packs});
    ranges.push_back({piece.outside, piece.numel * kernels::item_size(outside_type), !packs});
  }
  auto& machine = sim::Machine::here();
  if (machine.has_defect("packs one less") && packs) pieces = pieces.first(pieces.size() - 1);
  const auto stream = machine.has_defect("packs elsewhere") ? machine.make_stream() : machine.current_stream();
  if (machine.has_defect("packs without the factor") && packs) scale = 1.0;
  machine.queue(
      stream, packs ? "packing" : "unpacking", ranges, [=, pieces = std::vector(pieces.begin(), pieces.end())] {
        kernels::device::run({direction, flat, flat_type, pieces.data(), std::ssize(pieces), outside_type, scale});
      });
  return true;
}

}  // namespace torchddp::transport
