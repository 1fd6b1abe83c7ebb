// Bytes of collective operations: what they were given, and what this rank sends over the network or through shared memory for
// them.
//
// Note [Bytes on the wire]
// Neither c10d nor NCCL can report what they sent, so bytes are counted by the algorithm, without headers and acknowledgements.
// For a tensor of N bytes, each of W ranks sends
//   all-reduce 2 (W-1)/W N, all-gather and reduce-scatter (W-1)/W N: a ring, which gloo and NCCL use by default, and the
//     minimum for any algorithm that loads ranks evenly; NCCL's trees and in-switch sums may differ;
//   reduce N, the root nothing;
//   broadcast (W-1)/W N: the mean over ranks, since who sends how often differs between backends;
//   all-reduce of sparse tensors (W-1) N of its own N, because it is a gather.
// Shared memory has no wire. There the count is what this rank reads from and writes to other ranks' memory according to the
// plan of shm::Engine, regardless of which rank does the work of a late one. For a large all-reduce it equals a ring's. No
// torch here, so that it can be tested without it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace torchddp::transport {

// The route that bytes take. kOuter: between hosts whose ranks share memory within each.
enum class Route : uint8_t { kC10d, kShm, kOuter, kNccl };
inline constexpr size_t kNumRoutes = 4;
inline constexpr std::array<const char*, kNumRoutes> kRouteNames{"c10d", "shm", "outer", "nccl"};

struct RouteBytes {
  int64_t payload_bytes = 0;  // of the whole tensors: the input of a reduce-scatter, the output of an all-gather
  int64_t wire_bytes = 0;     // sent by this rank
  bool operator==(const RouteBytes&) const = default;
};

struct Traffic {
  std::array<RouteBytes, kNumRoutes> routes;

  RouteBytes& operator[](Route route) { return routes[static_cast<size_t>(route)]; }
  const RouteBytes& operator[](Route route) const { return routes[static_cast<size_t>(route)]; }
  Traffic& operator+=(const Traffic& other) {
    for (size_t i = 0; i < kNumRoutes; ++i) {
      routes[i].payload_bytes += other.routes[i].payload_bytes;
      routes[i].wire_bytes += other.routes[i].wire_bytes;
    }
    return *this;
  }
  Traffic operator-(const Traffic& other) const {
    auto result = *this;
    for (size_t i = 0; i < kNumRoutes; ++i) {
      result.routes[i].payload_bytes -= other.routes[i].payload_bytes;
      result.routes[i].wire_bytes -= other.routes[i].wire_bytes;
    }
    return result;
  }
  bool operator==(const Traffic&) const = default;
};

// Written by one thread at a time, read by any.
class TrafficCounter {
 public:
  void add(Route route, int64_t payload_bytes, int64_t wire_bytes) {
    const auto i = static_cast<size_t>(route);
    payload_bytes_[i].fetch_add(payload_bytes, std::memory_order_relaxed);
    wire_bytes_[i].fetch_add(wire_bytes, std::memory_order_relaxed);
  }
  Traffic read() const {
    Traffic result;
    for (size_t i = 0; i < kNumRoutes; ++i) {
      result.routes[i] = {payload_bytes_[i].load(std::memory_order_relaxed),
                          wire_bytes_[i].load(std::memory_order_relaxed)};
    }
    return result;
  }

 private:
  std::array<std::atomic<int64_t>, kNumRoutes> payload_bytes_{}, wire_bytes_{};
};

// --- of a network, see Note [Bytes on the wire]; `bytes` of the whole tensor, on `size` ranks ---

// An all-gather, a reduce-scatter or a broadcast.
constexpr int64_t one_way_bytes(int64_t bytes, int size) { return (size - 1) * bytes / size; }
constexpr int64_t all_reduce_bytes(int64_t bytes, int size) { return 2 * (size - 1) * bytes / size; }
constexpr int64_t reduce_bytes(int64_t bytes, bool is_root) { return is_root ? 0 : bytes; }

}  // namespace torchddp::transport
