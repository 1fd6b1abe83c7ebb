#include "reducer/report/peer_processes.h"

#include <c10/util/StringUtil.h>

#include <fstream>
#include <sstream>
#include <string_view>
#include <thread>

namespace torchddp::reducer {
namespace {

void skip(std::istringstream& fields, int count) {
  std::string skipped;
  for (int i = 0; i < count; ++i) {
    fields >> skipped;
  }
}

// "gone", "stopped", or null: it runs.
const char* trouble_of(const PeerProcess& peer) {
  std::ifstream file("/proc/" + std::to_string(peer.pid) + "/stat");
  std::string line;
  std::getline(file, line);
  // The name, in parentheses, may hold anything.
  const auto end = line.rfind(')');
  if (end == std::string::npos) {
    return "gone";
  }
  std::istringstream fields(line.substr(end + 1));
  constexpr int kBeforeFlags = 5;
  constexpr int kBeforeStart = 12;
  // PF_EXITING: set before connections are closed, on a busy machine long before the state is Z.
  constexpr uint64_t kExiting = 0x4;
  char state = 'X';
  fields >> state;
  skip(fields, kBeforeFlags);
  uint64_t flags = 0;
  fields >> flags;
  skip(fields, kBeforeStart);
  int64_t started = -1;
  fields >> started;
  if (started != peer.started || state == 'Z' || state == 'X' || (flags & kExiting) != 0) {
    return "gone";
  }
  return state == 'T' || state == 't' ? "stopped" : nullptr;
}

std::string look(const std::vector<PeerProcess>& peers, const std::string& told) {
  std::string text;
  for (const auto& peer : peers) {
    const auto* const trouble = trouble_of(peer);
    if (trouble != nullptr && told.find(c10::str("rank ", peer.rank, " died")) == std::string::npos) {
      text += c10::str(text.empty() ? "" : ", ", "rank ", peer.rank, " is ", trouble, " (process ", peer.pid,
                       " of this host)");
    }
  }
  return text;
}

}  // namespace

std::string missing_peers(const std::vector<PeerProcess>& peers, const std::string& told,
                          std::chrono::milliseconds patience) {
  constexpr std::chrono::milliseconds kPause(5);
  const auto until = std::chrono::steady_clock::now() + patience;
  const bool is_told = told.find(" died") != std::string::npos;
  for (;;) {
    auto text = look(peers, told);
    if (!text.empty() || is_told || peers.empty() || std::chrono::steady_clock::now() >= until) {
      return text;
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace torchddp::reducer
