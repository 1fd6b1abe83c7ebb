#include "model/sites.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <deque>
#include <fstream>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace torchddp::model {
namespace {

bool is_same(const Site& a, const Site& b) {
  return a.line == b.line && a.column == b.column && std::strcmp(a.file, b.file) == 0;
}

struct Hash {
  size_t operator()(const std::pair<const char*, unsigned>& place) const {
    return std::hash<const char*>()(place.first) ^ place.second * size_t{0x9E3779B97F4A7C15};
  }
};

std::deque<Site> known_sites;
// A header has a file name of its own in each source that includes it.
std::unordered_map<std::pair<const char*, unsigned>, const Site*, Hash> by_place;
const Site* weakened = nullptr;
Order weakened_to = Order::relaxed;

const Site* find(const Site& wanted) {
  const auto found = std::ranges::find_if(known_sites, [&](const Site& known) { return is_same(known, wanted); });
  return found != known_sites.end() ? &*found : nullptr;
}

// The place after the bracket that closes the one at `begin`.
size_t past_brackets(const std::string& code, size_t begin) {
  int depth = 0;
  for (size_t i = begin; i < code.size(); ++i) {
    depth += code[i] == '(' ? 1 : code[i] == ')' ? -1 : 0;
    if (depth == 0) return i + 1;
  }
  return code.size();
}

// Where the expression begins that ends with a call whose arguments are at `at`.
size_t begin_of(const std::string& code, size_t at) {
  int depth = 0;
  while (at > 0) {
    const char before = code[at - 1];
    depth += before == ')' || before == ']' ? 1 : before == '(' || before == '[' ? -1 : 0;
    const bool belongs = std::isalnum(static_cast<unsigned char>(before)) != 0 || before == '_' || before == '.';
    if (depth < 0 || (depth == 0 && !belongs && before != '(' && before != '[')) break;
    --at;
  }
  return at;
}

}  // namespace

std::string Site::name() const {
  std::ifstream source(file);
  std::string code;
  for (unsigned i = 0; i < line; ++i) std::getline(source, code);
  const std::string path = file;
  const auto at = std::min<size_t>(column - 1, code.size());  // of the arguments
  const auto begin = begin_of(code, at);
  return path.substr(path.rfind('/') + 1) + ": " + code.substr(begin, past_brackets(code, at) - begin);
}

std::vector<Order> Site::weaker() const {
  if (order == Order::relaxed) return {};
  if (order != Order::seq_cst) return {Order::relaxed};
  if (access == Access::kLoad) return {Order::relaxed, Order::acquire};
  if (access == Access::kStore) return {Order::relaxed, Order::release};
  return {Order::relaxed, Order::acquire, Order::release, Order::acq_rel};
}

Order order_of(const Where& where, Access access, Order order) {
  auto& site = by_place[{where.file_name(), where.line() << 10 | where.column()}];
  if (site == nullptr) {
    const Site added{where.file_name(), where.line(), where.column(), access, order};
    site = find(added);
    if (site == nullptr) site = &known_sites.emplace_back(added);
  }
  return site == weakened ? weakened_to : order;
}

std::vector<Site> sites() {
  std::vector<Site> result;
  std::ranges::copy_if(known_sites, std::back_inserter(result),
                       [](const Site& site) { return std::strstr(site.file, "/model/") == nullptr; });
  std::ranges::sort(result, {},
                    [](const Site& site) { return std::tuple(std::string(site.file), site.line, site.column); });
  return result;
}

void weaken(const Site* site, Order order) {
  weakened = site != nullptr ? find(*site) : nullptr;
  weakened_to = order;
}

const char* to_string(Order order) {
  constexpr const char* kNames[] = {"relaxed", "consume", "acquire", "release", "acq_rel", "seq_cst"};
  return kNames[static_cast<int>(order)];
}

}  // namespace torchddp::model
