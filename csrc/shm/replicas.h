// Values that one rank of a host makes and all of them use: one copy in memory, which each may still change for itself.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "shm/mesh.h"
#include "shm/private_view.h"
#include "shm/segment.h"

namespace torchddp::shm {

// Every rank has a file, its masters', and a private view of everybody's. A rank writes to its masters while no other rank needs
// what they held before, and calls refresh() once all have written: who agrees on that when is the caller's affair.
class Replicas {
 public:
  // Not collective: this rank's file, zeros. Throws Unavailable, also where views can't be told from files.
  explicit Replicas(int64_t own_bytes);

  // Collective: gives the file to all peers and takes theirs. `bytes`: of everybody's, by rank. `serial`: of this exchange between
  // these peers, larger than those before. `keep_waiting` is called now and then, and may throw. Throws Unavailable.
  void exchange(const std::vector<Peer>& peers, int rank, const std::vector<int64_t>& bytes, int64_t serial,
                std::chrono::milliseconds timeout, const std::function<void()>& keep_waiting);

  // This rank's file, which all others see.
  std::byte* masters() const { return masters_.base(); }
  int64_t own_bytes() const { return masters_.bytes(); }
  // What a rank has made, as this rank sees it.
  std::byte* seen(int rank) const { return replicas_[static_cast<size_t>(rank)].view.base(); }
  int64_t bytes(int rank) const { return replicas_[static_cast<size_t>(rank)].view.bytes(); }

  // What this process has changed in its own view, to the masters.
  void publish();
  // Everything that this process has changed in any view is replaced by the masters'.
  void refresh();

 private:
  // After so many refreshes that found changes, changed pages stay this process's own and are copied: a program that changes them
  // at each step would pay for a page fault each, which costs more than a copy.
  static constexpr int kMaxDrops = 20;

  struct Replica {
    Fd file;
    PrivateView view;
  };

  static void probe(PrivateView view, std::byte* shared);
  Fd take_file(int socket, int64_t serial, int64_t bytes, std::chrono::steady_clock::time_point deadline,
               const std::function<void()>& keep_waiting) const;

  Fd file_;
  Mapping masters_;
  std::vector<Replica> replicas_;  // by rank
  int rank_ = 0;
  int drops_ = 0;
};

}  // namespace torchddp::shm
