// Which processors this process may use, how many of them at a time, and where memory is near.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace torchddp::shm {

// The first 1024 processors.
using ProcessorMask = std::array<uint64_t, 16>;

int count(const ProcessorMask& mask);

// By the affinity of the calling thread; none if the machine has more.
ProcessorMask allowed_processors();

// How many processors a control group may use at a time.
struct Quota {
  int processors = 0;  // rounded down but at least one; 0: no group says
  uint64_t group = 0;  // which one says it: the same number for all processes of this host that share it
};

// The least that the group of this process, or any around it, is given: cpu.max (version 2), cpu.cfs_quota_us (version 1). `root`: of the
// file system.
Quota processor_quota(const std::string& root = "");

struct Allowance {
  ProcessorMask processors;
  Quota quota;
};

// Whether ranks with these have fewer processors than they are, all together or some of them: those that may run nowhere else (a
// scheduler binds each rank to its own, or several to one), and those in one control group (each may have a container of its own).
bool is_too_little(const std::vector<Allowance>& of_ranks);

// The node of memory that has all of these processors; else that which has `current`; 0 if the kernel knows none.
int memory_node(const ProcessorMask& allowed, int current, const std::string& root = "");

}  // namespace torchddp::shm
