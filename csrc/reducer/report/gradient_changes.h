// Whether gradients have changed since the reducer handed them back.
#pragma once

#include <cstdint>
#include <vector>

#include "reducer/base/context.h"

namespace torchddp::reducer {

enum class GradChange : uint8_t { kNone, kChanged, kGone, kReplaced };

// Costs nothing except in the requested steps. In those it compares version counters and, on the CPU, a hash of the values,
// because changes through `.data` do not bump the version.
class GradientChanges {
 public:
  explicit GradientChanges(const Context& context) : context_(context) {}

  // Records the gradients of the next step when they are handed back.
  void note_next() { wanted_ = true; }
  void handed_back() {
    if (wanted_) [[unlikely]] {
      note();
    }
  }
  // By parameter, the changes since then; empty if nothing was recorded. Forgets the record.
  std::vector<GradChange> take();

 private:
  struct Noted {
    const void* tensor = nullptr;  // null if there was no gradient
    int64_t version = 0;
    uint64_t hash = 0;
  };

  Noted look_at(int64_t param) const;
  void note();

  const Context& context_;
  bool wanted_ = false;
  std::vector<Noted> noted_;  // by parameter, or empty
};

}  // namespace torchddp::reducer
