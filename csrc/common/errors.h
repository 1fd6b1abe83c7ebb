// The errors that leave the engine, and how they cross autograd.
#pragma once

#include <stdexcept>
#include <string>

namespace torchddp {

// A peer is gone, a collective failed or timed out. Recoverable: the reducer is back in its idle state when this is thrown, so
// that the process can go on with another process group.
class TransportError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The autograd graph is not the one that was promised (a parameter used twice, or against static_graph). The step stays
// unfinished, so that the next forward says which gradients are missing.
class GraphError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What is wrong with a step that is finished when this is thrown.
class StepError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An averaged gradient is infinite or NaN.
class NonFiniteError : public StepError {
 public:
  using StepError::StepError;
};

// A weighted mean of gradients with no weight above 0.
class ZeroWeightError : public StepError {
 public:
  using StepError::StepError;
};

// A broken invariant of ours.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// Note [Errors across autograd]
// Hooks run inside torch's autograd engine, which carries a C++ exception to Python by a fixed list of types that does not
// contain ours. The bindings install a thrower that turns our errors into an exception type which that list maps to
// `torchddp.TransportError`, `FloatingPointError` and `ValueError`; without one (C++ tests) the error itself is thrown.
inline void (*autograd_thrower)(const std::runtime_error&) = nullptr;

template <typename Error>
[[noreturn]] void throw_across_autograd(const Error& error) {
  if (autograd_thrower != nullptr) {
    autograd_thrower(error);
  }
  throw error;
}

}  // namespace torchddp
