// How the backward ends that runs now: with an error, or without.
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "reducer/report/status.h"

namespace torchddp::reducer {

// Called in a hook. Tells `status` when the outermost backward of this thread has begun, and when it ends, at the cost of one
// callback; keeps nothing alive. Outside of a backward only the beginning is told.
void watch_backward(const std::shared_ptr<LiveStatus>& status);

// Gives "ValueError" for what such an error of Python's was thrown as, and nothing for errors of C++. The bindings install it:
// nothing here knows Python.
using ErrorTypeName = std::string (*)(const std::exception_ptr& error);
void set_error_type_name(ErrorTypeName name);

}  // namespace torchddp::reducer
