#include "reducer/report/status.h"

#include <c10/util/StringUtil.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <thread>

#include "common/errors.h"

namespace torchddp::reducer {

namespace {

// "gone", "stopped", or null if it is running.
const char* trouble_of(const PeerProcess& peer) {
  errno = 0;
  std::ifstream file("/proc/" + std::to_string(peer.pid) + "/stat");
  if (!file && errno != ENOENT) return nullptr;  // not known: there may be no free descriptor
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
  if (started != peer.started || state == 'Z' || state == 'X' || (flags & kExiting) != 0) return "gone";
  return state == 'T' || state == 't' ? "stopped" : nullptr;
}

// Peers that are gone or stopped, with rank and pid; empty if there are none, or if `error` reports a death: others may have ended
// because of it. A dying process closes its connections before it disappears, so this keeps looking for a while.
std::string missing_peers(const std::vector<PeerProcess>& peers, const std::string& error) {
  if (error.find(" died: ") != std::string::npos) return {};
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
  for (std::string text;;) {
    for (const auto& peer : peers) {
      const auto* const trouble = trouble_of(peer);
      if (trouble == nullptr) continue;
      text += c10::str(text.empty() ? "" : ", ", "rank ", peer.rank, " is ", trouble, " (process ", peer.pid,
                       " of this host)");
    }
    if (!text.empty() || peers.empty() || std::chrono::steady_clock::now() >= until) return text;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace

std::string LiveStatus::with_note(std::string text) {
  std::unique_lock lock(mutex_);
  const auto peers = peers_;
  lock.unlock();
  const auto missing = missing_peers(peers, text);
  if (!missing.empty()) {
    const auto advice = with_advice("");
    const bool is_gone = missing.find("gone") != std::string::npos;
    if (const auto at = text.find(advice); is_gone && at != std::string::npos) text.replace(at, advice.size(), kIfGone);
    text = missing + ".\n" + text;
  }
  lock.lock();
  const bool may_be_uneven = note_.empty() || note_.find("none left") != std::string::npos;
  if (const auto at = text.find(kIfUneven); !may_be_uneven && at != std::string::npos) {
    text.erase(at, std::string_view(kIfUneven).size());
  }
  if (!note_.empty()) text = missing.empty() ? note_ + "\n" + text : text + "\n" + note_;  // the cause first
  drop_note();
  return text;
}

}  // namespace torchddp::reducer
