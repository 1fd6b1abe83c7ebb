#include "reducer/report/messages.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <vector>

namespace torchddp::reducer {

std::string list_names(std::span<const int64_t> params, std::span<const plan::ParamSpec> specs, size_t at_most) {
  std::string text;
  const auto shown = std::min(at_most, params.size());
  for (size_t i = 0; i < shown; ++i) text += (i == 0 ? "'" : ", '") + specs[params[i]].name + "'";
  if (shown < params.size()) text += c10::str(" and ", params.size() - shown, " more");
  return text;
}

std::string unfinished_reduction_message(const Context& context, std::span<const int64_t> missing, bool static_graph,
                                         bool debug_is_off) {
  const auto rank = context.rank();
  const bool find_unused_parameters = context.config.find_unused_parameters;
  std::string text =
      c10::str("rank ", rank, ": ", list_names(missing, context.specs), " got no gradient in the last step");
  if (static_graph) {
    text +=
        ". Expected to have finished reduction in the prior iteration before starting a new one. This error indicates "
        "that your training graph has changed in this iteration, e.g., one parameter is used in first iteration, but "
        "then got unused in the second iteration. this is not compatible with static_graph set to True.";
  } else {
    text += ": either they were not used to compute the loss, or the last backward ended with an exception. ";
    text +=
        find_unused_parameters
            ? "Since `find_unused_parameters=True` is enabled, the loss probably leaves out an output: make sure all "
            : "If steps skip these on purpose, enable unused parameter detection by passing the keyword argument "
              "`find_unused_parameters=True`, or static_graph=True if every step skips the same ones; if no step uses "
              "them, set requires_grad=False before wrapping. Otherwise make sure all ";
    text +=
        "`forward` function outputs participate in calculating loss; they are searched for in tuples, lists, dicts and "
        "dataclasses.";
    // As torch's class says it: people search for it, and programs look for it.
    text += "\nExpected to have finished reduction in the prior iteration before starting a new one.";
  }
  const std::vector<int64_t> indices(missing.begin(), missing.end());
  std::vector<std::string> names;
  for (const auto param : missing) names.push_back(context.spec(param).name);
  text += c10::str("\nParameter indices which did not receive grad for rank ", rank, ": ", c10::Join(" ", indices));
  text += c10::str("\nParameters which did not receive grad for rank ", rank, ": ", c10::Join(", ", names));
  if (debug_is_off) {
    text +=
        "\nFor torch's own report on each collective, set the environment variable TORCH_DISTRIBUTED_DEBUG to either "
        "INFO or DETAIL.";
  }
  return text;
}

std::string marked_twice_message(const Context& context, int64_t param, bool marked_as_unused) {
  const auto& name = context.spec(param).name;
  std::string text = c10::str("Expected to mark a variable ready only once. On rank ", context.rank(),
                              ", the gradient of parameter '", name,
                              "' became ready twice in one step. This error is caused by one of the following "
                              "reasons: 1) Use of a module parameter outside the `forward` function, or in several "
                              "concurrent forward-backward passes. "
                              "2) Reused parameters in multiple reentrant backward passes, for example several "
                              "`checkpoint` functions around the same part of the model. For checkpoints, pass "
                              "use_reentrant=False to torch.utils.checkpoint, which needs nothing else; or "
                              "static_graph=True to DistributedDataParallel, which supports both if the graph is the "
                              "same in every step.");
  if (marked_as_unused) {
    text +=
        " 3) Incorrect unused parameter detection: the parameter could not be reached from the outputs of `forward`, "
        "yet it received a gradient. Tensors are found in tuples, lists, dictionaries and dataclasses, not in other "
        "objects that `forward` returns or keeps. If every parameter is used, pass find_unused_parameters=False; if "
        "the unused ones never change, pass static_graph=True.";
  }
  text += c10::str("\nParameter at index ", param, " with name ", name, " has been marked as ready twice.");
  return text;
}

std::string static_graph_changed_message(const Context& context, int64_t param) {
  return c10::str(
      "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but then "
      "got used in the second iteration. this is not compatible with static_graph set to True. On rank ",
      context.rank(), ", parameter '", context.spec(param).name,
      "' received a gradient more often than in the first synchronized step.");
}

std::string transport_failure_message(const Context& context, int64_t step, int64_t bucket, int64_t num_buckets,
                                      std::span<const int64_t> params) {
  return c10::str("rank ", context.rank(), ", step ", step, ": the reduction of bucket ", bucket, " of ", num_buckets,
                  " (parameters ", list_names(params, context.specs),
                  ") failed. Gradients of this step are not averaged on this rank.");
}

std::string non_finite_message(const Context& context, int64_t step, std::span<const int64_t> averages,
                               std::span<const int64_t> own) {
  std::string text = c10::str("rank ", context.rank(), ", step ", step, ": the averaged gradients of ", averages.size(),
                              averages.size() == 1 ? " parameter" : " parameters", " are infinite or NaN (",
                              list_names(averages, context.specs), "). ");
  if (own.empty()) {
    text += "This rank's own gradients were finite: another rank's were not, or the sum overflowed";
  } else {
    text += c10::str("This rank's own gradients were not finite for ", own.size(), " of them (",
                     list_names(own, context.specs), ")");
  }
  return text +
         "; model.nonfinite() shows on which rank and in which step. All ranks raise this at the end of the same "
         "backward. Before continuing, clear the gradients (zero_grad), and check the batch, the learning rate, and "
         "operations such as log, sqrt or a division in the named layers. With a GradScaler, which produces such "
         "gradients on purpose, use Checks(nonfinite=True) or none.";
}

}  // namespace torchddp::reducer
