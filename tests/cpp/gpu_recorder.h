// A fake device and a fake NCCL that record calls and fail on demand.
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

#include <unistd.h>

#include <cstdio>

#include "check.h"
#include "gpu/communicator.h"

namespace torchddp::testing {

// One log for both, to record their relative order.
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

// Redirects stderr to a file during its lifetime.
class StderrInto {
 public:
  StderrInto() : file_(std::tmpfile()), stderr_(dup(2)) { dup2(fileno(file_), 2); }
  ~StderrInto() {
    dup2(stderr_, 2);
    close(stderr_);
    std::fclose(file_);
  }
  StderrInto(const StderrInto&) = delete;
  StderrInto& operator=(const StderrInto&) = delete;

  std::string text() const {
    std::fflush(stderr);
    std::array<char, 1024> read{};
    const auto size = pread(fileno(file_), read.data(), read.size(), 0);
    return {read.data(), static_cast<size_t>(std::max<ssize_t>(0, size))};
  }

 private:
  std::FILE* const file_;
  const int stderr_;
};

// Streams and events are small numbers: s1 is the current stream, s2 the first one created; e1, e2 ... in order of creation.
class RecordingDevice final : public gpu::Device {
 public:
  explicit RecordingDevice(Diary& diary) : diary_(diary) {}

  gpu::Stream current_stream() override { return handle(current); }
  gpu::Stream make_stream(bool high_priority) override {
    ++alive;
    high_priority_streams += high_priority ? 1 : 0;
    return handle(++streams_);
  }
  gpu::Event make_event() override {
    ++alive;
    return handle(++events_);
  }
  gpu::Event make_timing_event() override { return make_event(); }
  void record(gpu::Event event, gpu::Stream stream, gpu::Place) override {
    if (spoilt_graph) {
      throw gpu::CaptureError("the graph is spoilt");
    }
    if (broken) {
      throw gpu::DeviceError("the device has fallen off the bus");
    }
    diary_.write(line_of("record e", event, " s", stream));
  }
  void wait(gpu::Stream stream, gpu::Event event, gpu::Place) override {
    diary_.write(line_of("s", stream, " waits e", event));
  }
  bool finished(gpu::Event) override {
    const bool is = idle;
    seen_idle += is ? 1 : 0;
    return is;
  }
  // Each event completes one ms after the previous one.
  double elapsed_ms(gpu::Event begin, gpu::Event end) override {
    return static_cast<double>(reinterpret_cast<intptr_t>(end) - reinterpret_cast<intptr_t>(begin));
  }
  bool capturing(gpu::Stream) override { return captures; }
  void synchronize(gpu::Event event) override { diary_.write(line_of("synchronize e", event)); }

  static gpu::Stream handle(int number) { return reinterpret_cast<void*>(static_cast<intptr_t>(number)); }

  std::atomic<int> current{1};
  std::atomic<bool> idle{true};
  std::atomic<int> seen_idle{0};  // number of queries that returned idle
  std::atomic<bool> captures{false};
  std::atomic<bool> broken{false};
  std::atomic<bool> spoilt_graph{false};
  std::atomic<int> alive{0};  // streams and events
  std::atomic<int> high_priority_streams{0};

 private:
  void drop_stream(gpu::Stream) noexcept override { --alive; }
  void drop_event(gpu::Event) noexcept override { --alive; }

  Diary& diary_;
  std::atomic<int> streams_{1};
  std::atomic<int> events_{0};
};

// Its communicator is itself.
class RecordingNccl final : public gpu::Nccl {
 public:
  explicit RecordingNccl(Diary& diary) : diary_(diary) {}

  int version() override { return running; }
  int built_version() const override { return 22907; }
  std::string describe(int result, gpu::Comm comm) override {
    use(comm);
    return line_of("error ", result);
  }

  int make_id(gpu::UniqueId* id) override {
    id->bytes[0] = 7;
    return gpu::kNcclSuccess;
  }
  std::vector<std::string> known_numbers() const override { return {"blocking", "min_ctas"}; }
  int init_rank(gpu::Comm* comm, int, const gpu::UniqueId&, int, const gpu::CommSettings& settings) override {
    last_settings = settings;
    {
      const std::lock_guard lock(mutex_);
      aborted_ = false;  // a new communicator
    }
    wait_while(init_hangs);
    *comm = refuse_comm ? nullptr : this;
    return init_result;
  }
  int async_error(gpu::Comm comm, int* error) override {
    use(comm);
    ++asked;
    *error = in_progress > 0 && in_progress-- > 0 ? gpu::kNcclInProgress : async.load();
    return gpu::kNcclSuccess;
  }
  int finalize(gpu::Comm comm) override {
    note("finalize", comm);
    return wait_while(finalize_hangs) ? kAborted : finalize_result.load();
  }
  int destroy(gpu::Comm comm) override { return note("destroy", comm); }
  int abort(gpu::Comm comm) override {
    use(comm);
    diary_.write("abort");
    std::unique_lock lock(mutex_);
    aborted_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !abort_hangs; });
    return gpu::kNcclSuccess;
  }
  void let_go(std::atomic<bool>& hangs) {
    const std::lock_guard lock(mutex_);
    hangs = false;
    changed_.notify_all();
  }

  int group_start() override {
    diary_.write("group");
    grouped_ = true;
    return gpu::kNcclSuccess;
  }
  // At the end of a group NCCL connects to peers for its calls.
  int group_end() override {
    diary_.write("group end");
    grouped_ = false;
    return wait_inside() ? kAborted : group_result.load();
  }
  int make_pre_mul_sum(gpu::SumOp* op, double scale, kernels::DType, gpu::Comm comm) override {
    *op = ++ops;
    return note(line_of("make op", *op, " times ", scale), comm);
  }
  int destroy_op(gpu::SumOp op, gpu::Comm comm) override { return note(line_of("destroy op", op), comm); }
  int all_reduce(const void*, void*, int64_t numel, kernels::DType, gpu::SumOp op, gpu::Comm comm,
                 gpu::Stream stream) override {
    const bool was_aborted = !grouped_ && wait_inside();
    const auto line = line_of("all_reduce ", numel, " s", stream);
    return was_aborted ? kAborted : note(op == gpu::kPlainSum ? line : line_of(line, " op", op), comm, call_result);
  }
  int reduce_scatter(const void*, void*, int64_t, kernels::DType, gpu::Comm comm, gpu::Stream) override {
    return note("reduce_scatter", comm);
  }
  int all_gather(const void*, void*, int64_t, kernels::DType, gpu::Comm comm, gpu::Stream) override {
    return note("all_gather", comm);
  }
  int reduce(void*, int64_t, kernels::DType, int, gpu::Comm comm, gpu::Stream) override { return note("reduce", comm); }
  int broadcast(void*, int64_t, kernels::DType, int, gpu::Comm comm, gpu::Stream) override {
    return note("broadcast", comm);
  }

  std::atomic<int> running{22907};
  std::atomic<int> init_result{gpu::kNcclSuccess}, call_result{gpu::kNcclSuccess}, group_result{gpu::kNcclSuccess},
      finalize_result{gpu::kNcclSuccess};
  std::atomic<int> async{gpu::kNcclSuccess};
  std::atomic<int> in_progress{0};  // returned this many more times
  std::atomic<int> asked{0};        // calls of async_error
  std::atomic<int> inside{0};       // threads inside an all-reduce or the end of a group
  std::atomic<bool> refuse_comm{false};
  // Block, as with a missing peer, until released or, for all but the first and the last kind, until the communicator is aborted.
  std::atomic<bool> init_hangs{false}, connect_hangs{false}, finalize_hangs{false}, abort_hangs{false};
  std::atomic<bool> used_after_abort{false};
  gpu::CommSettings last_settings;
  std::atomic<int> ops{0};

 private:
  static constexpr int kAborted = 6;

  bool wait_inside() {
    ++inside;
    const bool was_aborted = wait_while(connect_hangs);
    --inside;
    return was_aborted;
  }
  bool wait_while(const std::atomic<bool>& hangs) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return aborted_ || !hangs; });
    return aborted_;
  }
  // NCCL frees an aborted communicator.
  void use(gpu::Comm comm) {
    const std::lock_guard lock(mutex_);
    used_after_abort = used_after_abort || (comm != nullptr && aborted_);
  }
  int note(const std::string& line, gpu::Comm comm, int result = gpu::kNcclSuccess) {
    use(comm);
    diary_.write(line);
    return result;
  }

  Diary& diary_;
  std::atomic<bool> grouped_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool aborted_ = false;
};

}  // namespace torchddp::testing
