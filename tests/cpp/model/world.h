// The ranks of a host, whose segments are in the arena, and what is required of every execution.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/scheduler.h"
#include "shm/engine.h"
#include "shm/mesh.h"

namespace torchddp::model {

inline constexpr int kMaxRanks = 3;

// An operation; its inputs and result follow from its number.
struct Spec {
  shm::OpKind kind = shm::OpKind::kAllReduce;
  int64_t numel = 1;
  int root = 0;
  shm::Form form = shm::Form::kUsual;
  bool counted = false;  // reports non-finite values
  int infinite = -1;     // the rank whose input has an infinity
  bool refused = false;  // of a question: rank 0 says no
};

// A rank, as a program sees it. Its threads share the engine.
class World;
class Rank {
 public:
  // Operations in flight at the same time have different places, which are their memory.
  static constexpr int kPlaces = 3;

  int rank() const { return rank_; }
  shm::Engine& engine() { return *engine_; }
  void start(const Spec& spec, int place = 0);
  // Waits, checks the result, and gives the memory another use.
  void finish(int place = 0, std::chrono::milliseconds timeout = std::chrono::milliseconds(0));
  void check(int place);
  void run(const Spec& spec) {
    start(spec);
    finish();
  }

  // Leaves the channel, as a process group that is destroyed does, and meets the others in another. What other ranks may still
  // use of this one is given another use as soon as the mesh allows it. False if there is no room.
  bool meet_again();

 private:
  friend class World;
  struct Place {
    Spec spec;
    uint64_t seq = 0;
    uint64_t number = 0;  // among this rank's operations
    std::optional<shm::NonFinite> found;
  };

  float* block(int place) const;   // in the segment
  float* memory(int place) const;  // this rank's own
  float input(int of, int64_t i, const Place& place) const;
  bool is_right(const Place& place, const float* result) const;

  int rank_ = 0, size_ = 0;
  World* world_ = nullptr;
  std::optional<shm::Mesh> mesh_;
  std::vector<shm::ChannelEnd> ends_;  // of the channel
  std::optional<shm::Engine> engine_;
  std::array<Place, kPlaces> places_;
  uint64_t started_ = 0;
  std::optional<shm::Atomic<uint32_t>> threads_;
};

using Program = std::function<void(Rank&)>;
struct Thread {
  int rank;
  Program program;
};

enum class Fault : uint8_t {
  kNone,         // every operation succeeds, without the clock's help
  kDeath,        // a rank may die; the others' operations succeed or name it
  kInterrupted,  // rank 0 is interrupted; operations succeed, or give the reason there and name it elsewhere
  kGivenUp,      // the clock may move, but no operation fails unless the program allows for that
  kLeft,         // rank 1 leaves without a word; the others name it
  kSilent,       // rank 1 does not take part; the others name it when their time is up
};

class World {
 public:
  // To be called by Scheduler::run.
  void prepare(int size, const std::vector<Thread>& threads, Fault fault);
  // What is wrong with an execution that has ended, or nothing.
  std::string verdict();
  void clear();

 private:
  struct End {
    int rank;
    bool is_over = false;
    std::string error;
  };
  friend class Rank;
  void live(Rank& rank, const Program& program, End& end);
  // Tells the others; returns when all have told theirs.
  std::vector<shm::ChannelEnd> exchange(int rank, const shm::ChannelEnd& end);
  std::string verdict_of(const End& end) const;

  int size_ = 0;
  Fault fault_ = Fault::kNone;
  int64_t fault_time_ = 0;
  std::array<Rank, kMaxRanks> ranks_;
  std::vector<End> ends_;
  struct Meeting {
    std::array<shm::ChannelEnd, kMaxRanks> ends;
    std::optional<shm::Atomic<uint32_t>> told;
  };
  std::array<Meeting, shm::kMaxChannels> meetings_;
};

inline constexpr const char* kReason = "interrupted by the program";

}  // namespace torchddp::model
