// Whether gradients are still what the reducer has handed back.
#pragma once

#include <cstdint>
#include <vector>

#include "reducer/base/context.h"

namespace torchddp::reducer {

enum class GradChange : uint8_t { kNone, kChanged, kGone, kReplaced };

// Costs nothing but in steps that are asked for. Then version counters tell, and on the CPU a hash of the values too, since what is
// changed through `.data` counts no version.
class GradientChanges {
 public:
  explicit GradientChanges(const Context& context) : context_(context) {}

  // The gradients of the next step are noted when they are handed back.
  void note_next() { wanted_ = true; }
  void handed_back() {
    if (wanted_) [[unlikely]] {
      note();
    }
  }
  // By parameter, since then; empty if there is nothing to compare with. Forgets what was noted.
  std::vector<GradChange> take();

 private:
  struct Noted {
    const void* tensor = nullptr;  // null: there was no gradient
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
