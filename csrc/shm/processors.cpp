#include "shm/processors.h"

#include <sched.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <fstream>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <sstream>
#include <string_view>

namespace torchddp::shm {
namespace {

constexpr int kUnlimited = std::numeric_limits<int>::max();

bool is_within(const ProcessorMask& mask, const ProcessorMask& other) {
  return std::equal(mask.begin(), mask.end(), other.begin(), [](uint64_t a, uint64_t b) { return (a & ~b) == 0; });
}

// --- control groups ---

// Where a hierarchy that may limit processors is mounted, and where in it this process is.
struct Hierarchy {
  bool is_v2 = false;
  std::string mount;  // its folder
  std::string group;  // below that; "" or begins with a slash
};

bool names(const std::string& list, std::string_view word) {
  std::istringstream words(list);
  for (std::string next; std::getline(words, next, ',');) {
    if (next == word) return true;
  }
  return false;
}

// The path of this process in the hierarchy, as /proc/self/cgroup has it: "4:cpu,cpuacct:/path", or "0::/path" for version 2.
std::optional<std::string> path_in(bool is_v2, const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const auto controllers = line.substr(first + 1, second - first - 1);
    if (is_v2 ? line.starts_with("0::") : names(controllers, "cpu")) return line.substr(second + 1);
  }
  return std::nullopt;
}

// A line of /proc/self/mountinfo: "id parent device root mount options [tags] - type source options".
std::optional<Hierarchy> hierarchy_of(const std::string& line, const std::string& root) {
  std::istringstream words(line);
  std::string skipped, top, mount, type, source, options;
  words >> skipped >> skipped >> skipped >> top >> mount;
  while (words >> skipped && skipped != "-") {
  }
  words >> type >> source >> options;
  const bool is_v2 = type == "cgroup2";
  if (!is_v2 && (type != "cgroup" || !names(options, "cpu"))) return std::nullopt;
  auto group = path_in(is_v2, root);
  if (!group) return std::nullopt;
  // A container sees its own group where the hierarchy begins, but may be told the path that it has outside.
  if (top != "/" && (*group + '/').starts_with(top + '/')) {
    group->erase(0, top.size());
  } else if (top != "/" || group->starts_with("/..")) {
    group->clear();
  }
  return Hierarchy{is_v2, root + mount, *group == "/" ? "" : *group};
}

// What one group allows.
int quota_in(const std::string& folder, bool is_v2) {
  double quota = 0;
  double period = 0;
  if (is_v2) {
    std::ifstream(folder + "/cpu.max") >> quota >> period;  // "max" is no number
  } else {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;  // -1: none
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? static_cast<int>(std::clamp(quota / period, 1.0, 1e6)) : kUnlimited;
}

// Of a folder: containers may see their own by the same path.
uint64_t identity_of(const std::string& folder) {
  struct stat info{};
  return stat(folder.c_str(), &info) == 0 ? info.st_dev * 0x9E3779B97F4A7C15 ^ info.st_ino : 0;
}

}  // namespace

int count(const ProcessorMask& mask) {
  return std::accumulate(mask.begin(), mask.end(), 0, [](int sum, uint64_t word) { return sum + std::popcount(word); });
}

ProcessorMask allowed_processors() {
  ProcessorMask mask{};
  static_assert(sizeof(mask) == sizeof(cpu_set_t) && sizeof(mask[0]) == sizeof(__cpu_mask));
  // Fails with more processors than fit. All bits then mean that nothing is known to be scarce.
  if (sched_getaffinity(0, sizeof(mask), reinterpret_cast<cpu_set_t*>(mask.data())) != 0) mask.fill(~uint64_t{0});
  return mask;
}

Quota processor_quota(const std::string& root) {
  int least = kUnlimited;
  std::string where;
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    const auto hierarchy = hierarchy_of(line, root);
    if (!hierarchy) continue;
    for (auto group = hierarchy->group; true; group.erase(group.rfind('/'))) {
      const auto folder = hierarchy->mount + group;
      if (const int quota = quota_in(folder, hierarchy->is_v2); quota < least) {
        least = quota;
        where = folder;
      }
      if (group.rfind('/') == std::string::npos) break;
    }
  }
  return least == kUnlimited ? Quota{} : Quota{least, identity_of(where)};
}

bool is_too_little(const std::vector<Allowance>& of_ranks) {
  ProcessorMask all{};
  for (const auto& [processors, quota] : of_ranks) {
    std::ranges::transform(all, processors, all.begin(), std::bit_or<>());
  }
  const auto are_more = [&](int limit, auto&& is_one_of_them) {
    return std::ranges::count_if(of_ranks, is_one_of_them) > limit;
  };
  return are_more(count(all), [](const Allowance&) { return true; }) ||
         std::ranges::any_of(of_ranks, [&](const Allowance& rank) {
           const auto& [processors, quota] = rank;
           return are_more(count(processors),
                           [&](const Allowance& other) { return is_within(other.processors, processors); }) ||
                  (quota.processors > 0 && are_more(quota.processors, [&](const Allowance& other) {
                     return other.quota.processors > 0 && other.quota.group == quota.group;
                   }));
         });
}

}  // namespace torchddp::shm
