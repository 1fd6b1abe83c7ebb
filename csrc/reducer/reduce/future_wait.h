// Waiting for a future of somebody else, who may never complete it.
#pragma once

#include <ATen/core/ivalue.h>

#include "reducer/base/context.h"

namespace torchddp::reducer {

// Until it is complete, well or not. Throws TransportError, in the name of `what`, after the time limit of the module or its group.
void wait_for_future(const Context& context, c10::ivalue::Future& future, const char* what);

}  // namespace torchddp::reducer
