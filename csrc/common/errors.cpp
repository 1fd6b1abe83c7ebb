#include "common/errors.h"

namespace torchddp {
namespace {
TransportErrorThrower transport_error_thrower = nullptr;
NonFiniteErrorThrower non_finite_error_thrower = nullptr;
}  // namespace

void set_error_throwers(TransportErrorThrower transport_error, NonFiniteErrorThrower non_finite_error) {
  transport_error_thrower = transport_error;
  non_finite_error_thrower = non_finite_error;
}

void throw_across_autograd(const TransportError& error) {
  if (transport_error_thrower != nullptr) {
    transport_error_thrower(error);
  }
  throw error;
}

void throw_across_autograd(const NonFiniteError& error) {
  if (non_finite_error_thrower != nullptr) {
    non_finite_error_thrower(error);
  }
  throw error;
}

}  // namespace torchddp
