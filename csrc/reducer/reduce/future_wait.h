// Waits for a future that its owner may never complete.
#pragma once

#include <ATen/core/ivalue.h>

#include "reducer/base/context.h"

namespace torchddp::reducer {

// Returns once it is complete, successfully or not. After the time limit of the module or its group, throws a TransportError
// that names `what`.
void wait_for_future(const Context& context, c10::ivalue::Future& future, const char* what);

}  // namespace torchddp::reducer
