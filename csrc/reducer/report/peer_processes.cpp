#include "reducer/report/peer_processes.h"

#include <c10/util/StringUtil.h>

#include <cstdio>
#include <fstream>
#include <thread>

namespace torchddp::reducer {
namespace {

// "gone", "stopped", or null if it is running.
const char* trouble_of(const PeerProcess& peer) {
  std::ifstream file("/proc/" + std::to_string(peer.pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const auto name_end = line.rfind(')');  // the name, in parentheses, may contain anything
  char state = 'X';
  unsigned flags = 0;
  long long started = -1;
  // Fields 3, 9 and 22.
  constexpr const char* kFields = " %c %*d %*d %*d %*d %*d %u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %lld";
  if (name_end == std::string::npos ||
      std::sscanf(line.c_str() + name_end + 1, kFields, &state, &flags, &started) != 3) {
    return "gone";
  }
  // PF_EXITING is set before connections are closed; on a busy machine, long before the state is Z.
  constexpr unsigned kExiting = 0x4;
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
