// Adds what a user needs to know to a transport's error: the step, the bucket and the parameters.
#pragma once

#include <string>
#include <utility>

#include "common/check.h"
#include "reducer/report/events.h"

namespace torchddp::reducer {

// Runs `body`; a TransportError is rethrown as one that says `describe(its text)`.
template <typename Describe, typename Body>
decltype(auto) described(Describe&& describe, Body&& body) {
  try {
    return body();
  } catch (const TransportError& error) {
    throw TransportError(describe(std::string(error.what())));
  }
}

// The same for failures within a step: "rank 1, step 3: `what` failed: ...".
template <typename Body>
decltype(auto) described_in_step(const Context& context, const StepEvents& events, const std::string& what,
                                 Body&& body) {
  return described(
      [&](const std::string& reason) {
        return c10::str("rank ", context.rank(), ", step ", events.steps(), ": ", what, " failed: ", reason);
      },
      std::forward<Body>(body));
}

}  // namespace torchddp::reducer
