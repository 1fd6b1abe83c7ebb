// The longer error messages: what was got, on which rank, for which parameter and bucket, and what to do.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "plan/bucket_plan.h"

namespace torchddp::reducer {

// "'a.weight', 'a.bias' and 7 more"
std::string list_names(std::span<const int64_t> params, std::span<const plan::ParamSpec> specs, size_t at_most = 8);

std::string unfinished_reduction_message(int rank, std::span<const int64_t> missing,
                                         std::span<const plan::ParamSpec> specs, bool find_unused_parameters,
                                         bool static_graph, bool debug_is_off);
std::string marked_twice_message(int rank, int64_t param, std::span<const plan::ParamSpec> specs,
                                 bool marked_as_unused);
std::string static_graph_changed_message(int rank, int64_t param, std::span<const plan::ParamSpec> specs);
// `averages`: parameters with non-finite averages; `own`: those whose gradient on this rank was already non-finite.
std::string non_finite_message(int rank, int64_t step, std::span<const int64_t> averages, std::span<const int64_t> own,
                               std::span<const plan::ParamSpec> specs);
std::string transport_failure_message(int rank, int64_t step, int64_t bucket, int64_t num_buckets,
                                      std::span<const int64_t> params, std::span<const plan::ParamSpec> specs,
                                      const std::string& reason);

}  // namespace torchddp::reducer
