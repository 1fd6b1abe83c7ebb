#include "model/scenarios.h"

#include <chrono>
#include <stdexcept>
#include <utility>

#include "common/errors.h"

namespace torchddp::model {
namespace {

using shm::Form;
using shm::OpKind;
using std::chrono::milliseconds;

// An operation for so many ranks, by name. Blocks are in the segments; other inputs are sent in the post.
struct Named {
  const char* name;
  Spec (*spec)(int size);
};
constexpr Named kOperations[] = {
    {"barrier", [](int) -> Spec { return {.numel = 0}; }},
    {"all_reduce", [](int) -> Spec { return {.numel = 1}; }},
    {"all_reduce of chunks", [](int size) -> Spec { return {.numel = 2 * size}; }},
    {"all_reduce of two chunks each", [](int size) -> Spec { return {.numel = 4 * size}; }},
    {"all_reduce of chunks, one infinite",
     [](int size) -> Spec { return {.numel = 2 * size, .counted = true, .infinite = 1}; }},
    {"all_reduce by everyone", [](int) -> Spec { return {.numel = 4, .form = Form::kEveryone}; }},
    {"question", [](int) -> Spec { return {.numel = 0, .form = Form::kQuestion, .refused = true}; }},
    {"reduce", [](int) -> Spec { return {.kind = OpKind::kReduce, .numel = 1, .root = 1}; }},
    {"reduce of blocks", [](int) -> Spec { return {.kind = OpKind::kReduce, .numel = 4, .root = 1}; }},
    {"broadcast", [](int) -> Spec { return {.kind = OpKind::kBroadcast, .numel = 1}; }},
    {"broadcast of a block", [](int) -> Spec { return {.kind = OpKind::kBroadcast, .numel = 4, .root = 1}; }},
    {"all_gather", [](int) -> Spec { return {.kind = OpKind::kAllGather, .numel = 1}; }},
    {"all_gather of blocks", [](int) -> Spec { return {.kind = OpKind::kAllGather, .numel = 4}; }},
    {"reduce_scatter of blocks", [](int size) -> Spec { return {.kind = OpKind::kReduceScatter, .numel = 2 * size}; }},
};

Spec named(const std::string& name, int size) {
  for (const auto& [known, spec] : kOperations) {
    if (name == known) return spec(size);
  }
  throw std::invalid_argument(name);
}

std::vector<Thread> on_all(int size, const Program& program) {
  std::vector<Thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.push_back({rank, program});
  return threads;
}

Program in_sequence(std::vector<Spec> specs) {
  return [specs = std::move(specs)](Rank& rank) {
    for (const auto& spec : specs) rank.run(spec);
  };
}

// One more than there are slots: the last one waits for the first one's.
Program in_flight_together(std::vector<Spec> specs) {
  return [specs = std::move(specs)](Rank& rank) {
    for (size_t i = 0; i < specs.size(); ++i) rank.start(specs[i], static_cast<int>(i));
    for (size_t i = 0; i < specs.size(); ++i) rank.finish(static_cast<int>(i));
  };
}

class List {
 public:
  explicit List(int size) : size_(size) {}

  Scenario& add(const std::string& name, std::vector<Thread> threads, Fault fault = Fault::kNone) {
    auto& added = all_.emplace_back();
    added.name = name + ", " + std::to_string(size_) + " ranks";
    added.size = size_;
    added.threads = std::move(threads);
    added.fault = fault;
    added.budget.deaths = fault == Fault::kDeath ? 1 : 0;
    return added;
  }
  // As it is, with ranks that look again before they sleep, and that stop looking because their time is up; and with a rank that
  // dies.
  void add_all(const std::string& name, const Program& program) {
    add(name, on_all(size_, program));
    add(name + ", looking twice", on_all(size_, program)).looks = 1;
    add(name + ", late", on_all(size_, program)).budget.timeouts = 1;
    add(name + ", a death", on_all(size_, program), Fault::kDeath);
  }
  Spec spec(const char* name) const { return named(name, size_); }

  void add_operations() {
    for (const auto& [name, spec] : kOperations) {
      add_all(name, in_sequence({spec(size_)}));
    }
  }
  // Slots, posts and blocks are used again.
  void add_sequences() {
    for (const char* name : {"all_reduce", "all_reduce of chunks", "reduce of blocks", "broadcast of a block"}) {
      add_all(std::string("three times ") + name, in_sequence({spec(name), spec(name), spec(name)}));
    }
    add_all("chunks after a broadcast and a barrier",
            in_sequence({spec("broadcast"), spec("barrier"), spec("all_reduce of chunks")}));
    // The owner of a chunk may begin the third while another rank still looks for the marks of the first.
    add_all("chunks around a broadcast",
            in_sequence({spec("all_reduce of chunks"), spec("broadcast"), spec("all_reduce of chunks")}));
    add_all("three in flight", in_flight_together({spec("all_reduce of chunks"), spec("reduce"), spec("broadcast")}));
    add_all("three in flight, chunks last",
            in_flight_together({spec("broadcast"), spec("all_gather"), spec("all_reduce of chunks")}));
  }
  void add_interruptions() {
    for (const char* name : {"barrier", "all_reduce of chunks", "reduce of blocks", "broadcast"}) {
      auto threads = on_all(size_, in_sequence({spec(name), spec(name)}));
      threads.push_back({0, [](Rank& rank) { rank.engine().interrupt(kReason); }});
      add(std::string("twice ") + name + ", an interruption", std::move(threads), Fault::kInterrupted);
    }
  }
  // A second thread does the work of rank 0 too.
  void add_threads() {
    for (const char* name : {"all_reduce", "all_reduce of chunks", "reduce of blocks"}) {
      auto threads = on_all(size_, in_sequence({spec(name), spec(name)}));
      threads.push_back({0, [](Rank& rank) {
                           for (int i = 0; i < 3; ++i) rank.engine().progress();
                         }});
      add(std::string("twice ") + name + ", a second thread", std::move(threads));
    }
  }
  void add_absences() {
    for (const char* name : {"barrier", "all_reduce of chunks", "reduce of blocks"}) {
      auto threads = on_all(size_, in_sequence({spec(name)}));
      threads.erase(threads.begin() + 1);
      add(std::string(name) + ", a silent rank", threads, Fault::kSilent);
      threads.push_back({1, [](Rank&) {}});
      add(std::string(name) + ", a rank that leaves", threads, Fault::kLeft);
    }
  }

  // Ranks that give up an operation or have done it, meet twice in another channel.
  void add_channels() {
    for (const char* name : {"barrier", "all_reduce of chunks", "reduce of blocks"}) {
      const auto meet = [spec = spec(name)](Rank& rank, const Program& first) {
        first(rank);
        for (int i = 0; i < 2 && rank.meet_again(); ++i) rank.run(spec);
      };
      add(std::string(name) + ", in three channels",
          on_all(size_, [meet, spec = spec(name)](Rank& rank) { meet(rank, [&](Rank&) { rank.run(spec); }); }));
      add(std::string(name) + ", given up, in three channels",
          on_all(size_,
                 [meet, spec = spec(name)](Rank& rank) {
                   meet(rank, [&](Rank&) {
                     rank.start(spec);
                     try {
                       if (rank.rank() != 1) rank.finish();
                     } catch (const TransportError&) {
                     }
                   });
                 }),
          Fault::kGivenUp);
    }
  }

  std::vector<Scenario> take() { return std::move(all_); }

 private:
  const int size_;
  std::vector<Scenario> all_;
};

}  // namespace

std::vector<Scenario> scenarios() {
  std::vector<Scenario> all;
  for (int size = 2; size <= kMaxRanks; ++size) {
    List list(size);
    list.add_operations();
    list.add_sequences();
    list.add_interruptions();
    list.add_threads();
    list.add_absences();
    list.add_channels();
    for (auto& scenario : list.take()) all.push_back(std::move(scenario));
  }
  return all;
}

}  // namespace torchddp::model
