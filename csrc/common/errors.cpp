#include "common/errors.h"

namespace torchddp {
namespace {
TransportErrorThrower thrower_ = nullptr;
}  // namespace

void set_transport_error_thrower(TransportErrorThrower thrower) { thrower_ = thrower; }

void throw_across_autograd(const TransportError& error) {
  if (thrower_ != nullptr) {
    thrower_(error);
  }
  throw error;
}

}  // namespace torchddp
