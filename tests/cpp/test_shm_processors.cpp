// The processors that a rank may use, from the files of a fake machine.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <utility>

#include "shm/processors.h"
#include "shm_ranks.h"

namespace torchddp::shm {
namespace {

using Files = std::initializer_list<std::pair<const char*, const char*>>;

// A folder with these files, removed at the end.
class Machine {
 public:
  explicit Machine(const Files& files) {
    std::string name = "/tmp/torchddp-machine-XXXXXX";
    require(mkdtemp(name.data()) != nullptr, "no folder");
    root_ = name;
    for (const auto& [path, text] : files) {
      const auto file = std::filesystem::path(root_ + path);
      std::filesystem::create_directories(file.parent_path());
      std::ofstream(file) << text;
    }
  }
  ~Machine() { std::filesystem::remove_all(root_); }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  const std::string& root() const { return root_; }

 private:
  std::string root_;
};

int quota_with(const Files& files) { return processor_quota(Machine(files).root()).processors; }

constexpr const char* kMounts = "/proc/self/mountinfo";
constexpr const char* kGroups = "/proc/self/cgroup";
constexpr const char* kV2 =
    "25 1 0:22 / /proc rw - proc proc rw\n30 24 0:26 / /cg rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
constexpr const char* kV1 = "33 31 0:30 / /cg/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n";

TEST(shm_processors_quota_of_version_2_is_the_least_of_the_group_and_those_around_it) {
  const auto quota = [](const char* leaf, const char* middle, const char* top) {
    return quota_with({{kMounts, kV2},
                       {kGroups, "0::/a/b\n"},
                       {"/cg/a/b/cpu.max", leaf},
                       {"/cg/a/cpu.max", middle},
                       {"/cg/cpu.max", top}});
  };
  CHECK_EQ(quota("400000 100000", "max 100000", "max 100000"), 4);
  CHECK_EQ(quota("max 100000", "300000 100000", "max 100000"), 3);
  CHECK_EQ(quota("400000 100000", "800000 100000", "100000 50000"), 2);
  CHECK_EQ(quota("150000 100000", "max 100000", "max 100000"), 1);  // rounded down
  CHECK_EQ(quota("290000 100000", "max 100000", "max 100000"), 2);
  CHECK_EQ(quota("10000 100000", "max 100000", "max 100000"), 1);  // but not to zero
  CHECK_EQ(quota("max 100000", "max 100000", "max 100000"), 0);
  for (const char* garbage : {"", "what", "5", "-3 100000", "100000 0", "0 100000", "100000 -1"}) {
    CHECK_EQ(quota(garbage, garbage, garbage), 0);
    CHECK_EQ(quota(garbage, "300000 100000", garbage), 3);
  }
}

TEST(shm_processors_quota_of_version_1) {
  const auto quota = [](const char* us, const char* period, const char* around) {
    return quota_with({{kMounts, kV1},
                       {kGroups, "9:name=systemd:/elsewhere\n5:cpu,cpuacct:/jobs/one\n"},
                       {"/cg/cpu,cpuacct/jobs/one/cpu.cfs_quota_us", us},
                       {"/cg/cpu,cpuacct/jobs/one/cpu.cfs_period_us", period},
                       {"/cg/cpu,cpuacct/jobs/cpu.cfs_quota_us", around},
                       {"/cg/cpu,cpuacct/jobs/cpu.cfs_period_us", "100000"},
                       {"/cg/cpu,cpuacct/elsewhere/cpu.cfs_quota_us", "100000"},
                       {"/cg/cpu,cpuacct/elsewhere/cpu.cfs_period_us", "100000"}});
  };
  CHECK_EQ(quota("400000\n", "100000\n", "-1\n"), 4);
  CHECK_EQ(quota("400000\n", "100000\n", "250000\n"), 2);
  CHECK_EQ(quota("-1\n", "100000\n", "-1\n"), 0);
  CHECK_EQ(quota("-1\n", "100000\n", "700000\n"), 7);
  CHECK_EQ(quota("400000\n", "", "garbage"), 0);
}

TEST(shm_processors_quota_of_a_hybrid_of_both) {
  const std::string mounts = std::string(kV1) + kV2;
  const auto quota = [&](const char* v1, const char* v2) {
    return quota_with({{kMounts, mounts.c_str()},
                       {kGroups, "5:cpu,cpuacct:/a\n0::/b\n"},
                       {"/cg/cpu,cpuacct/a/cpu.cfs_quota_us", v1},
                       {"/cg/cpu,cpuacct/a/cpu.cfs_period_us", "100000"},
                       {"/cg/b/cpu.max", v2}});
  };
  CHECK_EQ(quota("300000", "max 100000"), 3);
  CHECK_EQ(quota("-1", "200000 100000"), 2);
  CHECK_EQ(quota("300000", "200000 100000"), 2);
}

// A container sees its own group as the root, with or without its own namespace.
TEST(shm_processors_quota_in_a_container) {
  const char* limit = "500000 100000";
  const char* mount_of_own = "30 24 0:26 /docker/abc /cg rw - cgroup2 cgroup2 rw\n";
  CHECK_EQ(quota_with({{kMounts, kV2}, {kGroups, "0::/\n"}, {"/cg/cpu.max", limit}}), 5);
  CHECK_EQ(quota_with({{kMounts, mount_of_own}, {kGroups, "0::/docker/abc\n"}, {"/cg/cpu.max", limit}}), 5);
  CHECK_EQ(quota_with({{kMounts, mount_of_own}, {kGroups, "0::/docker/abc/in\n"}, {"/cg/in/cpu.max", limit}}), 5);
  CHECK_EQ(quota_with({{kMounts, mount_of_own}, {kGroups, "0::/docker/abcdef\n"}, {"/cg/cpu.max", limit}}), 5);
  CHECK_EQ(quota_with({{kMounts, kV2}, {kGroups, "0::/../other\n"}, {"/cg/cpu.max", limit}}), 5);
  CHECK_EQ(quota_with({{kMounts, kV2}, {kGroups, "0::/not/seen/here\n"}, {"/cg/cpu.max", limit}}), 5);
}

TEST(shm_processors_quota_of_a_machine_that_says_nothing) {
  CHECK_EQ(quota_with({}), 0);
  CHECK_EQ(quota_with({{kMounts, kV2}}), 0);
  CHECK_EQ(quota_with({{kMounts, kV2}, {kGroups, "garbage\n:\n\n0::\n"}}), 0);
  CHECK_EQ(quota_with({{kMounts, "a b\n\n1 2 3 4 5 6 -\n"}, {kGroups, "0::/\n"}, {"/cpu.max", "100000 100000"}}), 0);
  CHECK_EQ(quota_with({{kMounts, "33 31 0:30 / /cg rw - cgroup cgroup rw,cpuset\n"},
                       {kGroups, "5:cpuset:/\n"},
                       {"/cg/cpu.cfs_quota_us", "100000"},
                       {"/cg/cpu.cfs_period_us", "100000"}}),
           0);
}

ProcessorMask mask_of(std::initializer_list<int> processors) {
  ProcessorMask mask{};
  for (const int next : processors) mask[static_cast<size_t>(next) / 64] |= uint64_t{1} << (next % 64);
  return mask;
}

TEST(shm_processors_of_this_process_are_in_its_header) {
  const Segment segment(0, 1, 0);
  const auto& header = *reinterpret_cast<const Header*>(segment.base());
  CHECK(count(header.cpu_mask) >= 1);
  CHECK(header.cpu_mask == allowed_processors());
  CHECK_EQ(header.quota, processor_quota().processors);
  CHECK_EQ(header.quota_group, processor_quota().group);
}

// One processor per rank, if their group may use as many.
TEST(shm_processors_are_crowded_below_one_each) {
  Host host(4);
  for (int rank = 0; rank < 4; ++rank) {
    host.header(rank).cpu_mask = mask_of({rank});
    host.header(rank).quota = 0;
  }
  const auto is_crowded = [&] {
    const auto config = host.config(0);
    return Board(config).is_crowded();
  };
  CHECK(!is_crowded());
  host.header(2).cpu_mask = mask_of({3});
  CHECK(is_crowded());
  host.header(2).cpu_mask = mask_of({70, 71});
  CHECK(!is_crowded());
  for (int rank = 0; rank < 4; ++rank) host.header(rank).quota = 4;
  CHECK(!is_crowded());
  host.header(1).quota = 3;
  CHECK(is_crowded());
  for (int rank = 0; rank < 4; ++rank) {  // each in its own container
    host.header(rank).quota = 1;
    host.header(rank).quota_group = 100 + rank;
  }
  CHECK(!is_crowded());
  host.header(3).quota_group = 100;
  CHECK(is_crowded());
}

// Tasks bound by a scheduler.
TEST(shm_processors_are_too_little_for_ranks_that_may_run_nowhere_else) {
  const auto bound = [](std::initializer_list<ProcessorMask> masks) {
    std::vector<Allowance> ranks;
    for (const auto& mask : masks) ranks.push_back({mask, {}});
    return is_too_little(ranks);
  };
  CHECK(!bound({mask_of({0, 1}), mask_of({0, 1}), mask_of({2, 3}), mask_of({2, 3})}));
  CHECK(bound({mask_of({0, 1}), mask_of({0, 1}), mask_of({0, 1}), mask_of({2, 3, 4, 5, 6, 7})}));
  CHECK(bound({mask_of({0}), mask_of({0}), mask_of({1, 2, 3})}));
  CHECK(!bound({mask_of({0}), mask_of({0, 1, 2, 3}), mask_of({0, 1, 2, 3})}));
  CHECK(bound({mask_of({0, 1}), mask_of({1, 2}), mask_of({2, 0}), mask_of({1})}));
}

TEST(shm_processors_of_groups_that_are_limited_apart) {
  const auto limited = [](std::initializer_list<Quota> quotas) {
    std::vector<Allowance> ranks;
    for (const auto& quota : quotas) ranks.push_back({mask_of({0, 1, 2, 3, 4, 5, 6, 7}), quota});
    return is_too_little(ranks);
  };
  CHECK(!limited({{2, 7}, {2, 7}, {2, 8}, {2, 8}}));
  CHECK(limited({{2, 7}, {2, 7}, {2, 7}, {8, 8}}));
  CHECK(limited({{1, 7}, {1, 7}, {0, 0}}));
  CHECK(!limited({{1, 7}, {0, 0}, {0, 0}, {0, 0}}));
}

TEST(shm_processors_a_quota_is_that_of_a_folder) {
  const auto limits = {std::pair{kMounts, kV2},
                       {kGroups, "0::/a/b\n"},
                       {"/cg/a/cpu.max", "200000 100000"},
                       {"/cg/a/b/cpu.max", "300000 100000"}};
  const Machine one(limits), other(limits);
  CHECK_EQ(processor_quota(one.root()).processors, 2);
  CHECK_EQ(processor_quota(one.root()).group, processor_quota(one.root()).group);
  CHECK(processor_quota(one.root()).group != processor_quota(other.root()).group);
  std::ofstream(one.root() + "/proc/self/cgroup") << "0::/a\n";  // the same limit without a nested group
  const auto around = processor_quota(one.root());
  std::ofstream(one.root() + "/proc/self/cgroup") << "0::/a/b\n";
  CHECK_EQ(around.group, processor_quota(one.root()).group);
}

}  // namespace
}  // namespace torchddp::shm
