// Which processors this process may use and how many of them at a time.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace torchddp::shm {

// The first 1024 processors.
using ProcessorMask = std::array<uint64_t, 16>;

int count(const ProcessorMask& mask);

// From the affinity of the calling thread; empty if the machine has more.
ProcessorMask allowed_processors();

// How many processors a control group may use at a time.
struct Quota {
  int processors = 0;  // rounded down, at least one; 0: not limited
  uint64_t group = 0;  // which group sets the limit: the same number in all processes of this host that share it
};

// The smallest quota of this process's group or any parent: cpu.max (version 2) or cpu.cfs_quota_us (version 1). `root`: of the
// file system.
Quota processor_quota(const std::string& root = "");

struct Allowance {
  ProcessorMask processors;
  Quota quota;
};

// Whether ranks with these allowances have fewer processors than ranks, in total or in a subset: ranks bound to the same
// processors (a scheduler binds each rank to its own, or several to one), or ranks in one control group (each may have its own
// container).
bool is_too_little(const std::vector<Allowance>& of_ranks);

}  // namespace torchddp::shm
