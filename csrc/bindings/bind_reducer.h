// Shared by the files that bind the Reducer.
#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include "bindings/bindings.h"
#include "reducer/reducer.h"

namespace torchddp::bindings {

using PyReducer = py::class_<reducer::Reducer, std::shared_ptr<reducer::Reducer>>;

// Exposes a method of one of the reducer's parts as a method of the reducer. `part`: a member of Parts, or a function of it.
template <typename Find, typename Part, typename Result, typename... Args>
auto of(Find part, Result (Part::*method)(Args...)) {
  return [part, method](reducer::Reducer& self, Args... args) -> std::decay_t<Result> {
    return (std::invoke(part, self.parts()).*method)(std::forward<Args>(args)...);
  };
}
template <typename Find, typename Part, typename Result, typename... Args>
auto of(Find part, Result (Part::*method)(Args...) const) {
  return [part, method](reducer::Reducer& self, Args... args) -> std::decay_t<Result> {
    return (std::invoke(part, self.parts()).*method)(std::forward<Args>(args)...);
  };
}

void bind_reducer_reports(py::module_& m, PyReducer& c);

}  // namespace torchddp::bindings
