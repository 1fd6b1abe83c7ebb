#include "nccl.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

#include "kernels/pack.h"
#include "kernels/sum.h"

namespace torchddp::sim {
namespace {

constexpr int kMaxRanks = 8;
constexpr size_t kMaxCommunicators = 8;
constexpr size_t kKept = 256;                // launches
constexpr int64_t kPart = int64_t{1} << 20;  // bytes that a rank passes at once
constexpr int kAborted = 6;
constexpr int kInvalidUsage = 5;

}  // namespace

enum class Kind : int { kAllReduce, kReduce, kReduceScatter, kAllGather, kBroadcast };
inline constexpr const char* kNames[] = {"all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast"};

// What must be the same on all ranks.
struct Terms {
  Kind kind;
  int type;
  int root;
  int in_group;  // place in its group
  int64_t numel;
  bool operator==(const Terms&) const = default;
};

static std::string text_of(const Terms& terms) {
  return std::string(kNames[static_cast<int>(terms.kind)]) + " of " + std::to_string(terms.numel) +
         " elements of type " + std::to_string(terms.type) + " with root " + std::to_string(terms.root) + ", number " +
         std::to_string(terms.in_group) + " of its group";
}

// How many calls a rank has launched on each communicator of its device; a communicator's name on all ranks is its key.
struct Launches {
  size_t size = 0;
  std::pair<size_t, uint64_t> of[kMaxCommunicators];

  // Whether both have launched as many on the communicators that both have.
  bool agrees(const Launches& other) const {
    return std::all_of(of, of + size, [&](const auto& own) {
      return std::all_of(other.of, other.of + other.size,
                         [&](const auto& theirs) { return theirs.first != own.first || theirs.second == own.second; });
    });
  }
};

struct alignas(64) Seat {
  std::atomic<int> joined;
  std::atomic<uint64_t> launched;
  Launches before[kKept];        // of each of the last calls of this communicator
  std::atomic<uint64_t> posted;  // how many parts this rank has offered
  std::atomic<uint64_t> read;    // and of how many it has read all ranks' parts
  Terms terms;
  alignas(64) std::byte data[kPart];
};

struct Room {
  std::atomic<int> aborted;
  Seat seats[kMaxRanks];
};

// A communicator's shared memory.
struct SimulatedNccl::Link {
  Link(const std::string& name, int rank_, int size_) : rank(rank_), size(size_), key(std::hash<std::string>()(name)) {
    const int fd = shm_open(name.c_str(), O_RDWR, 0600);
    if (fd < 0) throw std::runtime_error("no shared memory " + name);
    room = static_cast<Room*>(mmap(nullptr, sizeof(Room), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    close(fd);
    if (room == MAP_FAILED) throw std::runtime_error("could not map " + name);
    room->seats[rank].joined = 1;
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (!all([](const Seat& seat) { return seat.joined != 0; })) {
      if (std::chrono::steady_clock::now() > until) throw std::runtime_error("a rank does not come");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    if (rank == 0) shm_unlink(name.c_str());
  }
  ~Link() { munmap(room, sizeof(Room)); }
  Link& operator=(Link&&) = delete;

  // True after an abort, too: nothing waits then.
  template <class Test>
  bool all(Test&& test) const {
    return room->aborted != 0 || std::all_of(room->seats, room->seats + size, test);
  }
  bool all_launched(uint64_t number) const {
    return all([&](const Seat& seat) { return seat.launched >= number; });
  }
  bool all_have_read() const {
    return all([&](const Seat& seat) { return seat.read == parts; });
  }
  bool all_have_posted() const {
    return all([&](const Seat& seat) { return seat.posted >= parts; });
  }

  // Once all have read.
  void post(const Terms& terms, const void* data, int64_t bytes) {
    if (room->aborted != 0) throw std::runtime_error("aborted");
    auto& own = room->seats[rank];
    own.terms = terms;
    if (bytes > 0) std::memcpy(own.data, data, static_cast<size_t>(bytes));
    own.posted = ++parts;
  }

  // Calls read(rank, data) for each rank's part, once all have posted theirs.
  template <class Read>
  void read(const Terms& terms, Read&& read_part) {
    if (room->aborted != 0) throw std::runtime_error("aborted");
    for (int other = 0; other < size; ++other) {
      const auto& theirs = room->seats[other];
      if (!(theirs.terms == terms)) {
        differs = "rank " + std::to_string(rank) + " calls " + text_of(terms) + ", rank " + std::to_string(other) +
                  " " + text_of(theirs.terms);
      }
      read_part(other, theirs.data);
    }
    room->seats[rank].read = parts;
  }

  const int rank;
  const int size;
  const size_t key;
  Room* room = nullptr;
  uint64_t parts = 0;
  std::string differs;
};

struct SimulatedNccl::Communicator {
  std::unique_ptr<Link> link;
  std::map<gpu::SumOp, double> scales;
  gpu::SumOp last_op = gpu::kPlainSum;
  std::atomic<bool> aborted{false};
  std::atomic<bool> destroyed{false};
  std::atomic<int> pending{0};  // operations
  uint64_t launched = 0;
};

struct SimulatedNccl::Call {
  Terms terms;
  const void* input;
  void* output;
  double scale;
  Communicator* comm;
  StreamId stream;

  kernels::DType type() const { return static_cast<kernels::DType>(terms.type); }
  int64_t bytes(int64_t numel) const { return numel * kernels::item_size(type()); }
  std::vector<Range> ranges() const {
    const auto size = comm->link->size;
    const auto in = terms.numel * (terms.kind == Kind::kReduceScatter ? size : 1);
    const auto out = terms.numel * (terms.kind == Kind::kAllGather ? size : 1);
    return {{input, bytes(in), false}, {output, bytes(out), true}};
  }
  bool gathers() const { return terms.kind == Kind::kAllGather; }
  bool scatters() const { return terms.kind == Kind::kReduceScatter; }
  // Of what each rank posts.
  int64_t numel() const { return terms.numel * (scatters() ? comm->link->size : 1); }
  int64_t count_at(int64_t begin) const { return std::min(kPart / kernels::item_size(type()), numel() - begin); }
  void post(int64_t begin) const;
  void read(int64_t begin) const;
  void add_stages(std::vector<Stage>& stages) const;
};

void SimulatedNccl::Call::post(int64_t begin) const {
  const auto count = count_at(begin);
  const auto* from = static_cast<const std::byte*>(input) + bytes(begin);
  std::vector<std::byte> scaled;
  if (scale != 1.0) {
    scaled.resize(static_cast<size_t>(bytes(count)));
    kernels::scale_cast(scaled.data(), type(), from, type(), count, scale);
    from = scaled.data();
  }
  comm->link->post(terms, from, bytes(count));
}

void SimulatedNccl::Call::read(int64_t begin) const {
  auto& link = *comm->link;
  const auto count = count_at(begin);
  std::vector<std::byte> sum(static_cast<size_t>(bytes(count)));
  std::vector<const void*> inputs;
  link.read(terms, [&](int rank, const std::byte* data) {
    if (gathers()) std::memcpy(static_cast<std::byte*>(output) + bytes(rank * numel() + begin), data, sum.size());
    inputs.push_back(data);
    if (rank + 1 < link.size || gathers()) return;
    if (terms.kind == Kind::kBroadcast) {
      std::memcpy(sum.data(), inputs[static_cast<size_t>(terms.root)], sum.size());
    } else {
      void* const to = sum.data();
      kernels::reduce_ranks({&to, 1}, inputs, type(), kernels::ReduceOp::kSum, count);
    }
  });
  if (gathers() || (terms.kind == Kind::kReduce && link.rank != terms.root)) return;
  const auto first = scatters() ? link.rank * terms.numel : 0;  // of the elements that this rank keeps
  const auto low = std::max(begin, first);
  const auto high = std::min(begin + count, first + terms.numel);
  if (low < high) {
    std::memcpy(static_cast<std::byte*>(output) + bytes(low - first), sum.data() + bytes(low - begin),
                static_cast<size_t>(bytes(high - low)));
  }
}

// Two a part. None waits inside, because the machine is locked meanwhile.
void SimulatedNccl::Call::add_stages(std::vector<Stage>& stages) const {
  const auto per_part = kPart / kernels::item_size(type());
  for (int64_t begin = 0; begin == 0 || begin < numel(); begin += per_part) {
    stages.push_back({[comm = comm] { return comm->link->all_have_read(); }, [=, *this] { post(begin); }});
    stages.push_back({[comm = comm] { return comm->link->all_have_posted(); }, [=, *this] { read(begin); }});
  }
}

struct SimulatedNccl::Group {
  int depth = 0;
  std::vector<Call> calls;
  static Group& of_thread() {
    static thread_local Group group;
    return group;
  }
};

std::shared_ptr<SimulatedNccl> SimulatedNccl::here() {
  static auto* nccl = new std::shared_ptr<SimulatedNccl>(std::make_shared<SimulatedNccl>());
  return *nccl;
}

void SimulatedNccl::broken(const std::string& rule) {
  const std::lock_guard lock(mutex_);
  broken_.insert(rule);
}

std::vector<std::string> SimulatedNccl::broken_rules() {
  const std::lock_guard lock(mutex_);
  const auto rules = std::exchange(broken_, {});
  return {rules.begin(), rules.end()};
}

std::string SimulatedNccl::describe(int result, gpu::Comm) { return "simulated error " + std::to_string(result); }

int SimulatedNccl::make_id(gpu::UniqueId* id) {
  static std::atomic<int> made{0};
  const auto name = "/torchddp-sim-" + std::to_string(getpid()) + "-" + std::to_string(++made);
  const int fd = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(Room)) != 0) return 2;
  close(fd);
  std::ranges::copy(name, id->bytes.begin());
  return gpu::kNcclSuccess;
}

int SimulatedNccl::init_rank(gpu::Comm* comm, int size, const gpu::UniqueId& id, int rank, const gpu::CommSettings&) {
  if (size > 1) Machine::here().expect_peers();
  auto made = std::make_unique<Communicator>();
  made->link = std::make_unique<Link>(id.bytes.data(), rank, size);
  *comm = made.get();
  const std::lock_guard lock(mutex_);
  communicators_.push_back(std::move(made));
  return gpu::kNcclSuccess;
}

SimulatedNccl::Communicator* SimulatedNccl::use(gpu::Comm comm) {
  auto* const used = static_cast<Communicator*>(comm);
  if (used->aborted) broken("a call after an abort");
  if (used->destroyed) broken("a call on a destroyed communicator");
  return used;
}

int SimulatedNccl::async_error(gpu::Comm comm, int* error) {
  *error = use(comm)->link->room->aborted != 0 ? kAborted : gpu::kNcclSuccess;
  return gpu::kNcclSuccess;
}

int SimulatedNccl::finalize(gpu::Comm comm) {
  if (!use(comm)->scales.empty()) broken("a reduction operator that is never destroyed");
  return gpu::kNcclSuccess;
}

int SimulatedNccl::destroy(gpu::Comm comm) {
  auto* const used = use(comm);
  // Not by waiting for the device with its lock held, which the host may need for what the peers wait for.
  if (used->link->size == 1) Machine::here().synchronize();
  while (used->pending > 0 && !used->aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const std::lock_guard lock(mutex_);
  used->destroyed = true;
  used->link.reset();
  return gpu::kNcclSuccess;
}

int SimulatedNccl::abort(gpu::Comm comm) {
  auto* const used = use(comm);
  used->aborted = true;
  used->link->room->aborted = 1;
  return gpu::kNcclSuccess;
}

int SimulatedNccl::group_start() {
  ++Group::of_thread().depth;
  return gpu::kNcclSuccess;
}

int SimulatedNccl::group_end() {
  auto& group = Group::of_thread();
  if (group.depth == 0) {
    broken("a group that ends without a beginning");
    return kInvalidUsage;
  }
  if (--group.depth > 0) return gpu::kNcclSuccess;
  return launch(std::exchange(group.calls, {}));
}

int SimulatedNccl::make_pre_mul_sum(gpu::SumOp* op, double scale, kernels::DType, gpu::Comm comm) {
  auto* const used = use(comm);
  *op = ++used->last_op;
  used->scales[*op] = scale;
  return gpu::kNcclSuccess;
}

int SimulatedNccl::destroy_op(gpu::SumOp op, gpu::Comm comm) {
  if (Machine::here().has_defect("operator never destroyed")) return gpu::kNcclSuccess;
  if (Group::of_thread().depth > 0) broken("a reduction operator is destroyed before the group that uses it has ended");
  if (use(comm)->scales.erase(op) == 0) broken("a reduction operator is destroyed twice");
  return gpu::kNcclSuccess;
}

int SimulatedNccl::submit(Call call) {
  auto& group = Group::of_thread();
  call.terms.in_group = static_cast<int>(group.calls.size());
  if (group.depth > 0) {
    group.calls.push_back(std::move(call));
    return gpu::kNcclSuccess;
  }
  return launch({std::move(call)});
}

// A group is one operation of the device.
int SimulatedNccl::launch(std::vector<Call> calls) {
  if (calls.empty()) return gpu::kNcclSuccess;
  auto& machine = Machine::here();
  const bool sums = calls.front().terms.kind == Kind::kAllReduce;
  if (sums && machine.has_defect("reduces one less")) --calls.front().terms.numel;
  if (sums && calls.front().comm->link->rank == 1 && machine.has_defect("rank 1 has another order")) {
    if (held_back_.empty()) {
      held_back_ = std::move(calls);
      return gpu::kNcclSuccess;
    }
    for (auto& call : std::exchange(held_back_, {})) calls.push_back(std::move(call));
  }
  if (sums && machine.has_defect("memory given back in flight") && machine.owns(calls.front().output)) {
    machine.release(calls.front().output);
  }
  if (sums && machine.has_defect("reduces elsewhere")) {
    const auto elsewhere = machine.make_stream();
    for (auto& call : calls) call.stream = elsewhere;
  }
  enqueue(std::move(calls));
  return gpu::kNcclSuccess;
}

void SimulatedNccl::enqueue(std::vector<Call> calls) {
  auto& machine = Machine::here();
  const auto stream = calls.front().stream;
  std::string what = "NCCL's";
  std::vector<Range> ranges;
  const bool captured = machine.captures(stream);  // replays are not waited for: see Communicator::leave
  for (const auto& call : calls) {
    if (!captured) {
      ++call.comm->pending;
      compare_order(*call.comm);
    }
    if (call.stream != stream) broken("a group on several streams");
    what += std::string(" ") + kNames[static_cast<int>(call.terms.kind)];
    for (const auto& range : call.ranges()) ranges.push_back(range);
  }
  std::vector<Stage> stages;
  stages.push_back(
      {[last = calls.back().comm, number = calls.back().comm->launched] { return last->link->all_launched(number); },
       [] {}});
  for (const auto& call : calls) {
    call.add_stages(stages);
    stages.push_back(at_once([this, captured, comm = call.comm] {
      if (!captured) --comm->pending;
      if (!comm->link->differs.empty()) broken(comm->link->differs);
    }));
  }
  machine.queue_in_line(stream, what, ranges, std::move(stages));
}

// Kernels that wait for each other in another order on each rank may never end. Of two ranks, the one that launches a call later
// compares what both have launched on the other communicators before it, of the same ranks; and if a rank has not launched it
// yet, whether it has launched something that comes after it here.
void SimulatedNccl::compare_order(Communicator& comm) {
  const std::lock_guard lock(mutex_);
  auto& link = *comm.link;
  Launches before;
  std::vector<std::pair<Link*, uint64_t>> others;
  for (const auto& each : communicators_) {
    if (each->destroyed || each->link->size != link.size || before.size == kMaxCommunicators) continue;
    before.of[before.size++] = {each->link->key, each->launched};
    if (each.get() != &comm) others.emplace_back(each->link.get(), each->launched);
  }
  const auto number = comm.launched++;
  auto& own = link.room->seats[link.rank];
  own.before[number % kKept] = before;
  own.launched = number + 1;
  for (int rank = 0; rank < link.size; ++rank) {
    const auto& theirs = link.room->seats[rank];
    const bool is_ahead = std::ranges::any_of(
        others, [&](const auto& other) { return other.first->room->seats[rank].launched > other.second; });
    const auto launched = theirs.launched.load();
    const bool is_kept = launched > number && launched <= number + kKept;
    if (is_kept ? before.agrees(theirs.before[number % kKept]) : launched > number || !is_ahead) continue;
    broken_.insert("ranks " + std::to_string(link.rank) + " and " + std::to_string(rank) +
                   " launch calls of several communicators in different orders");
    link.room->aborted = 1;
    for (const auto& [other, _] : others) other->room->aborted = 1;
  }
}

int SimulatedNccl::all_reduce(const void* input, void* output, int64_t numel, kernels::DType type, gpu::SumOp op,
                              gpu::Comm comm, gpu::Stream stream) {
  auto* const used = use(comm);
  auto scale = 1.0;
  if (op != gpu::kPlainSum) {
    const auto found = used->scales.find(op);
    if (found == used->scales.end()) {
      broken("a reduction operator that does not exist");
      return kInvalidUsage;
    }
    scale = Machine::here().has_defect("NCCL's factor is lost") ? 1.0 : found->second;
  }
  return submit({{Kind::kAllReduce, static_cast<int>(type), 0, 0, numel},
                 input,
                 output,
                 scale,
                 used,
                 reinterpret_cast<StreamId>(stream)});
}

int SimulatedNccl::reduce(void* data, int64_t numel, kernels::DType type, int root, gpu::Comm comm,
                          gpu::Stream stream) {
  return submit({{Kind::kReduce, static_cast<int>(type), root, 0, numel},
                 data,
                 data,
                 1.0,
                 use(comm),
                 reinterpret_cast<StreamId>(stream)});
}

int SimulatedNccl::reduce_scatter(const void* input, void* output, int64_t numel, kernels::DType type, gpu::Comm comm,
                                  gpu::Stream stream) {
  return submit({{Kind::kReduceScatter, static_cast<int>(type), 0, 0, numel},
                 input,
                 output,
                 1.0,
                 use(comm),
                 reinterpret_cast<StreamId>(stream)});
}

int SimulatedNccl::all_gather(const void* input, void* output, int64_t numel, kernels::DType type, gpu::Comm comm,
                              gpu::Stream stream) {
  return submit({{Kind::kAllGather, static_cast<int>(type), 0, 0, numel},
                 input,
                 output,
                 1.0,
                 use(comm),
                 reinterpret_cast<StreamId>(stream)});
}

int SimulatedNccl::broadcast(void* data, int64_t numel, kernels::DType type, int root, gpu::Comm comm,
                             gpu::Stream stream) {
  return submit({{Kind::kBroadcast, static_cast<int>(type), root, 0, numel},
                 data,
                 data,
                 1.0,
                 use(comm),
                 reinterpret_cast<StreamId>(stream)});
}

}  // namespace torchddp::sim
