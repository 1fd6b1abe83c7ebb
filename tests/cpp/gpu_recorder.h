// A device and a NCCL that write down what they are asked, and fail on demand.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/communicator.h"

namespace torchddp::testing {

// Of the parts, one after the other; handles as the numbers that they are.
template <typename... Parts>
std::string line_of(const Parts&... parts) {
  std::ostringstream line;
  const auto add = [&](const auto& part) {
    if constexpr (std::is_same_v<std::decay_t<decltype(part)>, void*>) {
      line << reinterpret_cast<intptr_t>(part);
    } else {
      line << part;
    }
  };
  (add(parts), ...);
  return line.str();
}

// One diary for both, so that the order between them shows.
class Diary {
 public:
  void write(std::string line) {
    const std::lock_guard lock(mutex_);
    lines_.push_back(std::move(line));
  }
  std::vector<std::string> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(lines_, {});
  }
  int count(const std::string& line) {
    const std::lock_guard lock(mutex_);
    return static_cast<int>(std::count(lines_.begin(), lines_.end(), line));
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

// Streams and events are small numbers: s1 is the current stream, s2 the first that is made; e1, e2 ... in order.
class RecordingDevice final : public gpu::Device {
 public:
  explicit RecordingDevice(Diary& diary) : diary_(diary) {}

  gpu::Stream current_stream() override { return handle(current); }
  gpu::Stream make_stream() override {
    ++alive;
    return handle(++streams_);
  }
  void destroy_stream(gpu::Stream) noexcept override { --alive; }
  gpu::Event make_event() override {
    ++alive;
    return handle(++events_);
  }
  gpu::Event make_timing_event() override { return make_event(); }
  void destroy_event(gpu::Event) noexcept override { --alive; }
  void record(gpu::Event event, gpu::Stream stream) override {
    if (spoilt_graph) {
      throw gpu::CaptureError("the graph is spoilt");
    }
    if (broken) {
      throw gpu::DeviceError("the device has fallen off the bus");
    }
    diary_.write(line_of("record e", event, " s", stream));
  }
  void wait(gpu::Stream stream, gpu::Event event) override { diary_.write(line_of("s", stream, " waits e", event)); }
  bool finished(gpu::Event) override {
    const bool is = idle;
    seen_idle += is ? 1 : 0;
    return is;
  }
  // An event is over as many ms after the first as is the number between them.
  double elapsed_ms(gpu::Event begin, gpu::Event end) override {
    return static_cast<double>(reinterpret_cast<intptr_t>(end) - reinterpret_cast<intptr_t>(begin));
  }
  bool capturing(gpu::Stream) override { return captures; }
  void synchronize() override { diary_.write("synchronize"); }

  static gpu::Stream handle(int number) { return reinterpret_cast<void*>(static_cast<intptr_t>(number)); }

  std::atomic<int> current{1};
  std::atomic<bool> idle{true};
  std::atomic<int> seen_idle{0};  // times that somebody asked and was told so
  std::atomic<bool> captures{false};
  std::atomic<bool> broken{false};
  std::atomic<bool> spoilt_graph{false};
  std::atomic<int> alive{0};  // streams and events

 private:
  Diary& diary_;
  std::atomic<int> streams_{1};
  std::atomic<int> events_{0};
};

class RecordingNccl final : public gpu::Nccl {
 public:
  explicit RecordingNccl(Diary& diary) : diary_(diary) {}

  int version() override { return running; }
  int built_version() const override { return 22907; }
  std::string describe(int result, gpu::Comm) override { return line_of("error ", result); }

  int make_id(gpu::UniqueId* id) override {
    id->bytes[0] = 7;
    return gpu::kNcclSuccess;
  }
  int init_rank(gpu::Comm* comm, int, const gpu::UniqueId&, int) override {
    *comm = refuse_comm ? nullptr : this;
    return init_result;
  }
  int async_error(gpu::Comm, int* error) override {
    if (auto* window = std::exchange(pending_window_, nullptr)) {
      *window = this;  // as NCCL does for a communicator that does not block: later, on a thread of its own
    }
    *error = in_progress > 0 && in_progress-- > 0 ? gpu::kNcclInProgress : async.load();
    return gpu::kNcclSuccess;
  }
  int finalize(gpu::Comm) override { return note("finalize", finalize_result); }
  int destroy(gpu::Comm) override { return note("destroy"); }
  int abort(gpu::Comm) override {
    note("abort");
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !abort_hangs; });
    return gpu::kNcclSuccess;
  }
  void let_abort_go() {
    const std::lock_guard lock(mutex_);
    abort_hangs = false;
    changed_.notify_all();
  }

  int memory_alloc(void** memory, int64_t bytes) override {
    if (alloc_result == gpu::kNcclSuccess) {
      *memory = ::operator new(static_cast<size_t>(bytes));
      ++blocks;
    }
    return alloc_result;
  }
  int memory_free(void* memory) override {
    ::operator delete(memory);
    --blocks;
    return note("free");
  }
  int window_register(gpu::Comm, void*, int64_t, gpu::Window* window) override {
    pending_window_ = window;
    return note("register");
  }
  int window_deregister(gpu::Comm, gpu::Window) override { return note("deregister"); }

  int all_reduce(const void*, void*, int64_t numel, kernels::DType, gpu::Comm, gpu::Stream stream) override {
    return note(line_of("all_reduce ", numel, " s", stream), call_result);
  }
  int reduce_scatter(const void*, void*, int64_t, kernels::DType, gpu::Comm, gpu::Stream) override {
    return note("reduce_scatter");
  }
  int all_gather(const void*, void*, int64_t, kernels::DType, gpu::Comm, gpu::Stream) override {
    return note("all_gather");
  }
  int reduce(void*, int64_t, kernels::DType, int, gpu::Comm, gpu::Stream) override { return note("reduce"); }
  int broadcast(void*, int64_t, kernels::DType, int, gpu::Comm, gpu::Stream) override { return note("broadcast"); }

  std::atomic<int> running{22907};
  std::atomic<int> init_result{gpu::kNcclSuccess}, call_result{gpu::kNcclSuccess}, finalize_result{gpu::kNcclSuccess};
  std::atomic<int> alloc_result{gpu::kNcclSuccess};
  std::atomic<int> async{gpu::kNcclSuccess};
  std::atomic<int> in_progress{0};  // so many more times
  std::atomic<bool> refuse_comm{false};
  std::atomic<bool> abort_hangs{false};
  std::atomic<int> blocks{0};

 private:
  int note(const std::string& line, int result = gpu::kNcclSuccess) {
    diary_.write(line);
    return result;
  }

  Diary& diary_;
  gpu::Window* pending_window_ = nullptr;
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace torchddp::testing
