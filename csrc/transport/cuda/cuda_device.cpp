#include "transport/cuda/cuda_device.h"

namespace torchddp::transport {

bool is_gpu(at::Device device) { return device.is_cuda(); }
at::Device gpu_at(int index) { return {at::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

}  // namespace torchddp::transport

#ifdef TORCHDDP_WITH_CUDA

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <array>
#include <mutex>
#include <vector>

namespace torchddp::transport {
namespace {

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // so that torch does not report it again elsewhere
    const auto message = std::string(what) + ": " + cudaGetErrorString(result);
    if (result >= cudaErrorStreamCaptureUnsupported && result <= cudaErrorStreamCaptureWrongThread) {
      throw gpu::CaptureError(message);
    }
    throw gpu::DeviceError(message);
  }
}

// In CUDA's strictest mode these calls would invalidate a graph that another thread is capturing, unless they are declared
// harmless.
template <typename Call>
cudaError_t harmlessly(Call&& call) {
  auto mode = cudaStreamCaptureModeRelaxed;
  check(cudaThreadExchangeStreamCaptureMode(&mode), "changing the capture mode");
  const auto result = call();
  check(cudaThreadExchangeStreamCaptureMode(&mode), "changing the capture mode back");
  return result;
}

cudaEvent_t event_of(gpu::Event event) { return static_cast<cudaEvent_t>(event); }

class CudaDevice final : public gpu::Device {
 public:
  explicit CudaDevice(int index) : index_(static_cast<c10::DeviceIndex>(index)) {}

  gpu::Stream current_stream() override { return c10::cuda::getCurrentCUDAStream(index_).stream(); }

  gpu::Stream make_stream(bool high_priority) override {
    const c10::cuda::CUDAGuard guard(index_);
    int lowest = 0;
    int highest = 0;
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "querying stream priorities");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, high_priority ? highest : lowest),
          "creating a stream");
    return stream;
  }
  gpu::Event make_event() override { return make_event_with(cudaEventDisableTiming); }
  gpu::Event make_timing_event() override { return make_event_with(cudaEventDefault); }
  void record(gpu::Event event, gpu::Stream stream, gpu::Place) override {
    const c10::cuda::CUDAGuard guard(index_);
    check(cudaEventRecord(event_of(event), stream_of(stream)), "recording an event");
  }
  void wait(gpu::Stream stream, gpu::Event event, gpu::Place) override {
    const c10::cuda::CUDAGuard guard(index_);
    check(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0), "making a stream wait");
  }

  bool finished(gpu::Event event) override {
    const c10::cuda::CUDAGuard guard(index_);  // the watchdog must not make a context on device 0
    const auto result = harmlessly([&] { return cudaEventQuery(event_of(event)); });
    if (result == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    check(result, "the device failed");
    return true;
  }

  double elapsed_ms(gpu::Event begin, gpu::Event end) override {
    const c10::cuda::CUDAGuard guard(index_);
    float elapsed = 0;
    check(cudaEventElapsedTime(&elapsed, event_of(begin), event_of(end)), "reading the time between two events");
    return elapsed;
  }

  bool capturing(gpu::Stream stream) override {
    const c10::cuda::CUDAGuard guard(index_);  // a null stream is that of the current device
    auto status = cudaStreamCaptureStatusNone;
    const auto result = cudaStreamIsCapturing(stream_of(stream), &status);
    if (result == cudaErrorStreamCaptureImplicit) {
      // This is the legacy default stream while some other stream captures; it doesn't capture.
      static_cast<void>(cudaGetLastError());
      return false;
    }
    check(result, "querying whether a graph is being captured");
    return status != cudaStreamCaptureStatusNone;
  }

  // Not of the device, which would end all captures.
  void synchronize(gpu::Event event) override {
    const c10::cuda::CUDAGuard guard(index_);
    check(harmlessly([&] { return cudaEventSynchronize(event_of(event)); }), "the device failed");
  }

 private:
  // Errors of these two can't be handled: at process exit the driver may already be gone.
  void drop_stream(gpu::Stream stream) noexcept override { static_cast<void>(cudaStreamDestroy(stream_of(stream))); }
  void drop_event(gpu::Event event) noexcept override { static_cast<void>(cudaEventDestroy(event_of(event))); }

  gpu::Event make_event_with(unsigned int flags) {
    const c10::cuda::CUDAGuard guard(index_);
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, flags), "creating an event");
    return event;
  }

  c10::DeviceIndex index_;
};

}  // namespace

std::shared_ptr<gpu::Device> device_of(at::Device of) {
  if (!of.is_cuda()) return nullptr;
  const auto index = of.index();
  static std::mutex mutex;
  static auto* const devices = new std::vector<std::shared_ptr<gpu::Device>>();  // outlives whatever runs at exit
  const std::lock_guard lock(mutex);
  if (devices->size() <= static_cast<size_t>(index)) devices->resize(index + 1);
  auto& device = (*devices)[index];
  if (device == nullptr) device = std::make_shared<CudaDevice>(index);
  return device;
}

std::string device_identity(int index) {
  std::array<char, 64> bus{};
  check(cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), index), "querying the device's PCI bus id");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, index), "querying the device's properties");
  std::string text;
  for (const auto byte : properties.uuid.bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return text + " at " + bus.data();
}

}  // namespace torchddp::transport

#else

namespace torchddp::transport {

std::shared_ptr<gpu::Device> device_of(at::Device) { return nullptr; }
std::shared_ptr<gpu::Nccl> nccl_library(int) { return nullptr; }
std::string device_identity(int) { return ""; }
bool move_by_kernels(kernels::Direction, void*, kernels::DType, std::span<const kernels::DevicePiece>, kernels::DType,
                     double, at::Device) {
  return false;
}

}  // namespace torchddp::transport

#endif
