// Whether the current backward ends with an error.
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "reducer/report/status.h"

namespace torchddp::reducer {

// Called in a hook. Tells `status` when this thread's outermost backward began and when it ends, for the cost of one callback;
// keeps nothing alive. Outside of a backward only the beginning is reported.
void watch_backward(const std::shared_ptr<LiveStatus>& status);

// Maps the C++ form of a Python exception to its name, such as "ValueError"; empty for C++ errors. Installed by the bindings,
// since nothing here knows Python.
using ErrorTypeName = std::string (*)(const std::exception_ptr& error);
void set_error_type_name(ErrorTypeName name);

}  // namespace torchddp::reducer
