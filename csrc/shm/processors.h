// Which processors this process may use, how many of them at a time, and where memory is near.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace torchddp::shm {

// The first 1024 processors.
using ProcessorMask = std::array<uint64_t, 16>;

int count(const ProcessorMask& mask);

// By the affinity of the calling thread; none if the machine has more.
ProcessorMask allowed_processors();

// How many the control groups of this process allow at a time, rounded down but at least one; 0 if they don't say. The least that it, or
// any group around it, is given: cpu.max (version 2), cpu.cfs_quota_us (version 1). `root`: of the file system.
int processor_quota(const std::string& root = "");

// The node of memory that has all of these processors; else that which has `current`; 0 if the kernel knows none.
int memory_node(const ProcessorMask& allowed, int current, const std::string& root = "");

}  // namespace torchddp::shm
