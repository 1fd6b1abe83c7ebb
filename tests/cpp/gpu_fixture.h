// A communicator over the recorders, and helpers for its tests.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "common/errors.h"
#include "gpu/communicator.h"
#include "gpu_recorder.h"

namespace torchddp::gpu {

using namespace std::chrono_literals;
using testing::Diary;
using testing::has;
using testing::RecordingDevice;
using testing::RecordingNccl;
using Lines = std::vector<std::string>;

// For what ends by itself: a busy machine takes less, so a wait that takes this long has hung.
constexpr auto kPatience = 60s;
// A time limit that a test lets pass, of something that takes no time: a busy machine does not take as long.
constexpr auto kLimit = 1000ms;

inline bool soon(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

struct Fixture {
  Diary diary;
  std::shared_ptr<RecordingDevice> device = std::make_shared<RecordingDevice>(diary);
  std::shared_ptr<RecordingNccl> nccl = std::make_shared<RecordingNccl>(diary);
  CommunicatorConfig config{1, 4, kPatience, kPatience, 1ms, 20ms};
  std::chrono::milliseconds timeout = 10min;  // timeout of operations

  std::unique_ptr<Communicator> make() { return std::make_unique<Communicator>(nccl, device, config, UniqueId{}); }
  void all_reduce(Communicator& comm, Ticket& ticket, int64_t numel = 8, int64_t bucket = -1,
                  std::shared_ptr<void> keep = nullptr) {
    comm.start(
        ticket, {"all_reduce", numel, bucket, timeout},
        [&](Comm handle, Stream stream) {
          return nccl->all_reduce(nullptr, nullptr, numel, kernels::DType::kF32, kPlainSum, handle, stream);
        },
        std::move(keep));
  }
  // Whether the thread that inherited the table exits once it is released.
  bool ends_without(std::atomic<bool>& hangs) {
    const std::weak_ptr<RecordingNccl> alive = nccl;
    nccl->let_go(hangs);
    return soon([&] { return alive.use_count() == 1; });
  }
};

// A communicator and an operation on it.
struct Joined : Fixture {
  using Fixture::all_reduce;
  void all_reduce(int64_t numel = 8, int64_t bucket = -1, std::shared_ptr<void> keep = nullptr) {
    all_reduce(*comm, ticket, numel, bucket, std::move(keep));
  }
  void check_aborts_once() {
    CHECK(soon([&] { return diary.count("abort") == 1; }));
  }

  std::unique_ptr<Communicator> comm = make();
  Ticket ticket;
};

template <typename Body>
std::string error_of(const Body& body) {
  return testing::thrown_by<TransportError>(body);
}

// Calls NCCL as another thread would.
struct Caller {
  template <typename Body>
  explicit Caller(Body body) : thread([this, body] { error = error_of(body); }) {}
  const std::string& end() {
    thread.join();
    return error;
  }
  std::string error;
  std::thread thread;
};

}  // namespace torchddp::gpu
