// Ranks of one host as threads of one process over the same mappings, which ThreadSanitizer can follow; and operations
// whose inputs and expected results have a closed form.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "common/errors.h"
#include "shm/engine.h"
#include "shm/segment.h"

namespace torchddp::shm {

using Bytes = std::vector<std::byte>;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Sanitizers are ten to twenty times slower, so they run each kind once, on few ranks.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kIsSanitized = true;
#else
constexpr bool kIsSanitized = false;
#endif

// Long enough for a busy machine under a sanitizer; a test that takes this long has hung. What ends earlier ended because of an
// event, and its error says which.
constexpr milliseconds kPatience{60'000};

// The checks of check.h are for the main thread; other threads throw.
inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

// Runs body(rank) on one thread per rank; returns the text of what each threw, or "".
template <class Body>
std::vector<std::string> run_ranks(int size, const Body& body) {
  std::vector<std::string> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

template <class Body>
void check_ranks(int size, const Body& body) {
  for (const std::string& error : run_ranks(size, body)) CHECK_EQ(error, "");
}

using testing::has;

// The text of what a call throws, or "".
template <class Call>
std::string error_of(const Call& call) {
  return testing::thrown_by<TransportError>(call);
}

inline int64_t ms_since(Clock::time_point start) {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - start).count();
}

// Makes a call a moment later, from its own thread.
class Later {
 public:
  explicit Later(std::function<void()> call, milliseconds delay = milliseconds(40))
      : thread_([call = std::move(call), delay] {
          std::this_thread::sleep_for(delay);
          call();
        }) {}
  ~Later() { thread_.join(); }

 private:
  std::thread thread_;
};

// Runs `body` in a child process, which exits with its return value, or 99 if it throws.
class Process {
 public:
  template <class Body>
  explicit Process(const Body& body) : pid_(fork()) {
    if (pid_ != 0) return;
    int status = 99;
    try {
      status = body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
    }
    _exit(status);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void kill() const { ::kill(pid_, SIGKILL); }
  // Waits for the exit status; -1 if it was killed.
  int end() const {
    int status = 0;
    waitpid(pid_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  const pid_t pid_;
};

// Group ranks 10, 11, ... in errors, to distinguish them from indices on this host.
class Host {
 public:
  explicit Host(int size) : gone(static_cast<size_t>(size)) {
    for (int rank = 0; rank < size; ++rank) segments_.push_back(std::make_unique<Segment>(rank, size, 0));
  }

  // As if every rank had its own processor.
  void make_roomy() {
    for (int rank = 0; rank < size(); ++rank) {
      header(rank).cpu_mask.fill(UINT64_MAX);
      header(rank).quota = 0;
    }
  }

  int size() const { return static_cast<int>(segments_.size()); }
  Segment& segment(int rank) { return *segments_[static_cast<size_t>(rank)]; }
  Header& header(int rank) { return *reinterpret_cast<Header*>(segment(rank).base()); }

  EngineConfig config(int rank) {
    EngineConfig config;
    config.rank = rank;
    for (int peer = 0; peer < size(); ++peer) {
      config.segments.push_back({segment(peer).base(), segment(peer).bytes()});
      config.group_ranks.push_back(10 + peer);
    }
    config.gone = [this](int peer) { return gone[static_cast<size_t>(peer)].load(); };
    config.timeout = kPatience;
    config.owners = size();
    config.run_parallel = [](int threads, const std::function<void()>& body) {
      std::vector<std::thread> others;
      for (int i = 1; i < threads; ++i) others.emplace_back(body);
      body();
      for (auto& thread : others) thread.join();
    };
    return config;
  }

  std::unique_ptr<Engine> engine(int rank) { return std::make_unique<Engine>(config(rank)); }

  std::vector<std::atomic<bool>> gone;

 private:
  std::vector<std::unique_ptr<Segment>> segments_;
};

// --- operations with known inputs -------------------------------------------------------------------------------------

struct Spec {
  OpKind kind = OpKind::kAllReduce;
  int64_t numel = 1;
  kernels::DType type = kernels::DType::kF32;
  kernels::ReduceOp op = kernels::ReduceOp::kSum;
  int root = 0;
  uint32_t salt = 0;
};

constexpr OpKind kKinds[] = {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather, OpKind::kBroadcast,
                             OpKind::kReduce};

// Rounded to whole pieces if an operation splits its input.
inline int64_t numel_of(const Spec& spec, int size) {
  return spec.kind == OpKind::kReduceScatter ? (spec.numel + size - 1) / size * size : spec.numel;
}

// Values of very different magnitudes and both signs: another summation order would change the result.
inline double stamp(uint32_t salt, int rank, int64_t i) {
  auto bits =
      (static_cast<uint32_t>(i) + 1) * 2654435761u ^ (static_cast<uint32_t>(rank) + salt * 31 + 1) * 0x85EBCA6Bu;
  bits ^= bits >> 15;
  bits *= 0x2C1B3C6Du;
  bits ^= bits >> 12;
  const auto scale = static_cast<double>(1u << (bits >> 16 & 15)) / ((bits & 0x80000000u) != 0 ? -65536 : 65536);
  return (static_cast<double>(bits & 0xFFFF) + 0.37) * scale;
}

template <class Convert>
Bytes stamped_as(const Spec& spec, int rank, int64_t numel, const Convert& convert) {
  std::vector<decltype(convert(0.0))> values(static_cast<size_t>(numel));
  for (size_t i = 0; i < values.size(); ++i) values[i] = convert(stamp(spec.salt, rank, static_cast<int64_t>(i)));
  Bytes bytes(values.size() * sizeof(values[0]));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

inline Bytes stamped(const Spec& spec, int rank, int64_t numel) {
  const auto as = [&](const auto& convert) { return stamped_as(spec, rank, numel, convert); };
  const auto upper_half = [](double x) {
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(x)) >> 16);
  };
  switch (spec.type) {
    case kernels::DType::kF64: return as([](double x) { return x; });
    case kernels::DType::kF32: return as([](double x) { return static_cast<float>(x); });
    case kernels::DType::kF16: break;
    case kernels::DType::kBF16: return as(upper_half);
    case kernels::DType::kI8:
    case kernels::DType::kU8: return as([](double x) { return static_cast<uint8_t>(static_cast<int64_t>(x)); });
    case kernels::DType::kI16: return as([](double x) { return static_cast<int16_t>(static_cast<int64_t>(x)); });
    case kernels::DType::kI32: return as([](double x) { return static_cast<int32_t>(x); });
    case kernels::DType::kI64: return as([](double x) { return static_cast<int64_t>(x); });
  }
  throw std::invalid_argument("no stamps of this type");
}

// Sums in rank order, in plain C++ fp32 arithmetic; other tests cover the kernels.
inline Bytes reduced(const Spec& spec, const std::vector<Bytes>& inputs) {
  Bytes result(inputs[0].size());
  if (spec.type == kernels::DType::kF32 && spec.op == kernels::ReduceOp::kSum) {
    std::vector<float> totals(result.size() / 4);
    std::vector<float> next(totals.size());
    for (size_t rank = 0; rank < inputs.size() && !totals.empty(); ++rank) {
      std::memcpy((rank == 0 ? totals : next).data(), inputs[rank].data(), result.size());
      for (size_t i = 0; rank > 0 && i < totals.size(); ++i) totals[i] += next[i];
    }
    if (!totals.empty()) std::memcpy(result.data(), totals.data(), result.size());
    return result;
  }
  std::vector<const void*> sources;
  for (const Bytes& input : inputs) sources.push_back(input.data());
  void* const target[] = {result.data()};
  kernels::reduce_ranks(target, sources, spec.type, spec.op,
                        static_cast<int64_t>(result.size()) / kernels::item_size(spec.type));
  return result;
}

inline Bytes expected_result(const Spec& spec, int size, int rank) {
  const auto numel = numel_of(spec, size);
  std::vector<Bytes> inputs;
  for (int peer = 0; peer < size; ++peer) inputs.push_back(stamped(spec, peer, numel));
  const auto piece = static_cast<std::ptrdiff_t>(inputs[0].size()) / size;
  const auto slice = [&](const Bytes& bytes) {
    return Bytes(bytes.begin() + rank * piece, bytes.begin() + (rank + 1) * piece);
  };
  Bytes result;
  switch (spec.kind) {
    case OpKind::kAllReduce: return reduced(spec, inputs);
    case OpKind::kReduce: return rank == spec.root ? reduced(spec, inputs) : Bytes();
    case OpKind::kReduceScatter: return slice(reduced(spec, inputs));
    case OpKind::kAllGather:
      for (const Bytes& input : inputs) result.insert(result.end(), input.begin(), input.end());
      return result;
    case OpKind::kBroadcast: return inputs[static_cast<size_t>(spec.root)];
  }
  return result;
}

// What a rank posts, for peers without an engine.
inline void set_location(Post& post, int64_t offset) {
  const Location location{offset};
  std::memcpy(post.data.data(), &location, sizeof(location));
}

inline void fill_post(Post& post, const Operation& operation, int64_t offset) {
  post.terms = {.kind = operation.kind,
                .type = static_cast<uint8_t>(operation.type),
                .op = static_cast<uint8_t>(operation.op),
                .root = static_cast<uint8_t>(operation.root),
                .numel = operation.numel};
  set_location(post, offset);
}

// With none of its chunks claimed.
inline void open_chunks(Slot& slot, uint64_t seq) {
  slot.claimed.store(Tally::pack(seq, 0));
  slot.marks.store(Marks::none(seq));
}

// One rank's part of an operation: its memory and the expected result. Inputs sent in the slot, and all outputs except
// that of a large all-reduce, are in memory of exactly their size.
class Exchange {
 public:
  Exchange(Host& host, int rank, const Spec& spec) : segment_(host.segment(rank)), spec_(spec) {
    const auto size = host.size();
    operation_.kind = spec.kind;
    operation_.type = spec.type;
    operation_.op = spec.op;
    operation_.root = spec.root;
    operation_.numel = numel_of(spec, size);
    expected_ = expected_result(spec, size, rank);
    has_input_ = spec.kind != OpKind::kBroadcast || rank == spec.root;
    input_ = stamped(spec, rank, operation_.numel);
    output_.resize(expected_.size());
  }
  Exchange(Host& host, int rank, const Spec& spec, Engine& engine) : Exchange(host, rank, spec) { start(engine); }
  ~Exchange() {
    if (block_ != nullptr) segment_.release(block_);
  }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  void start(Engine& engine) {
    if (has_input_ && !engine.is_eager(operation_)) {
      block_ = segment_.allocate(operation_.bytes());
      require(block_ != nullptr, "no room in the segment");
      std::copy(input_.begin(), input_.end(), static_cast<std::byte*>(block_));
    }
    operation_.input = !has_input_ ? nullptr : block_ != nullptr ? block_ : input_.data();
    operation_.output = in_place() ? block_ : output_.data();
    if (spec_.kind == OpKind::kReduce && expected_.empty()) operation_.output = nullptr;  // not the root
    seq_ = engine.start(operation_);
  }

  uint64_t seq() const { return seq_; }
  // For an all-reduce over several hosts.
  void expect(Bytes result) { expected_ = std::move(result); }

  Bytes result() const {
    const auto* data = in_place() ? static_cast<const std::byte*>(block_) : output_.data();
    const bool is_untouched = spec_.kind == OpKind::kBroadcast && has_input_;  // the root's output is its input
    return is_untouched ? input_ : Bytes(data, data + expected_.size());
  }

  // Throws unless the result is bitwise as expected.
  void check() const {
    const Bytes actual = result();
    const auto what = "kind " + std::to_string(static_cast<int>(spec_.kind)) + ", type " +
                      std::to_string(static_cast<int>(spec_.type)) + ", numel " + std::to_string(operation_.numel) +
                      ", root " + std::to_string(spec_.root);
    if (actual != expected_) {
      const auto at = std::mismatch(actual.begin(), actual.end(), expected_.begin()).first - actual.begin();
      throw std::runtime_error(what + ": wrong result at byte " + std::to_string(at));
    }
    require(block_ == nullptr || in_place() ||
                std::equal(input_.begin(), input_.end(), static_cast<const std::byte*>(block_)),
            what + ": the input changed");
  }

  void finish(Engine& engine, milliseconds timeout = kPatience) {
    engine.wait(seq_, timeout);
    check();
  }

 private:
  bool in_place() const { return spec_.kind == OpKind::kAllReduce && block_ != nullptr; }

  Segment& segment_;
  Spec spec_;
  Operation operation_;
  Bytes input_;
  Bytes output_;
  Bytes expected_;
  bool has_input_ = true;
  void* block_ = nullptr;
  uint64_t seq_ = 0;
};

inline void run_one(Host& host, Engine& engine, int rank, const Spec& spec) {
  Exchange(host, rank, spec, engine).finish(engine);
}

// All ranks run every operation and wait for it.
inline void run_all(Host& host, const std::vector<Spec>& specs) {
  check_ranks(host.size(), [&](int rank) {
    const auto engine = host.engine(rank);
    for (const Spec& spec : specs) run_one(host, *engine, rank, spec);
  });
}

}  // namespace torchddp::shm
