// What errors say.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "common/check.h"
#include "plan/bucket_plan.h"
#include "reducer/report/events.h"

namespace torchddp::reducer {

// "'a.weight', 'a.bias' and 7 more"
std::string list_names(std::span<const int64_t> params, std::span<const plan::ParamSpec> specs, size_t at_most = 8);

std::string unfinished_reduction_message(const Context& context, std::span<const int64_t> missing, bool static_graph,
                                         bool debug_is_off);
std::string marked_twice_message(const Context& context, int64_t param, bool marked_as_unused);
std::string static_graph_changed_message(const Context& context, int64_t param);
// `averages`: parameters with non-finite averages; `own`: those whose gradient on this rank was already non-finite.
std::string non_finite_message(const Context& context, int64_t step, std::span<const int64_t> averages,
                               std::span<const int64_t> own);
std::string transport_failure_message(const Context& context, int64_t step, int64_t bucket, int64_t num_buckets,
                                      std::span<const int64_t> params);

// Runs `body`; a TransportError is rethrown with where(), a line of its own after the cause, and what `live` adds.
template <typename Where, typename Body>
decltype(auto) described(Where&& where, Body&& body, LiveStatus* live = nullptr) {
  try {
    return body();
  } catch (const TransportError& error) {
    const auto text = c10::str(error.what(), "\n", where());
    throw TransportError(live != nullptr ? live->with_note(text) : text);
  }
}

// The same within a step: "rank 1, step 3: `what` failed."
template <typename Body>
decltype(auto) described_in_step(const Context& context, const StepEvents& events, const std::string& what,
                                 Body&& body) {
  return described([&] { return c10::str("rank ", context.rank(), ", step ", events.steps(), ": ", what, " failed."); },
                   std::forward<Body>(body));
}

}  // namespace torchddp::reducer
