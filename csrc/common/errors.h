// The errors that leave the engine, and how they pass through autograd.
#pragma once

#include <stdexcept>
#include <string>

namespace torchddp {

// A peer is gone, or a collective failed or timed out. Recoverable: the reducer is idle again when this is thrown, so the
// process can continue with another process group.
struct TransportError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What its text says after the cause, unless the cause rules it out.
inline constexpr const char* kIfUneven =
    "\nIf ranks have different numbers of batches, give all of them the same number (torchddp.sync.even_batches, a "
    "sampler with drop_last=True), or train a DistributedDataParallel under `with model.join():`.";
// The same for a cause that says nothing of the peers.
inline std::string with_advice(const std::string& cause) {
  if (cause.find(kIfUneven) != std::string::npos) return cause;  // the text of an error of ours, from inside a hook
  return cause + " A peer died, left, or did not get here in time: look for the first error in the other ranks' logs." +
         kIfUneven;
}
// What takes its place where a peer's process is known to have ended.
inline constexpr const char* kIfGone =
    " Look for the first error in the ranks' logs. A rank that has fewer batches than the others also exits early: see "
    "torchddp.sync.even_batches.";

// The autograd graph is not as promised (a parameter was used twice, or static_graph was violated). The step stays unfinished,
// so that the next forward names the missing gradients.
struct GraphError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An error about a step that is otherwise finished.
struct StepError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An averaged gradient is infinite or NaN.
struct NonFiniteError : StepError {
  using StepError::StepError;
};

// A weighted mean whose weights were all 0.
struct ZeroWeightError : StepError {
  using StepError::StepError;
};

// One of our own invariants is broken.
struct InternalError : std::logic_error {
  using std::logic_error::logic_error;
};

// Note [Errors across autograd]
// Hooks run inside torch's autograd engine, which translates C++ exceptions to Python by a fixed list of types that does not
// contain ours. The bindings install a thrower that converts our errors to a type on that list, which becomes
// `torchddp.TransportError`, `FloatingPointError` or `ValueError`. Without a thrower (C++ tests) the error itself is thrown.
inline void (*autograd_thrower)(const std::runtime_error&) = nullptr;

template <typename Error>
[[noreturn]] void throw_across_autograd(const Error& error) {
  if (autograd_thrower != nullptr) autograd_thrower(error);
  throw error;
}

}  // namespace torchddp
