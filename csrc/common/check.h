// Checks whose messages say what was got and what was expected.
#pragma once

#include <c10/util/StringUtil.h>

#include "common/errors.h"

// A condition that the user can break: RuntimeError in Python.
#define TDDP_CHECK(condition, ...)                       \
  do {                                                   \
    if (!(condition)) [[unlikely]] {                     \
      throw std::runtime_error(::c10::str(__VA_ARGS__)); \
    }                                                    \
  } while (false)

// A condition that only a bug of ours can break.
#define TDDP_INTERNAL(condition, ...)                                                                                  \
  do {                                                                                                                 \
    if (!(condition)) [[unlikely]] {                                                                                   \
      throw ::torchddp::InternalError(                                                                                 \
          ::c10::str("torchddp internal error, please report it: ", __VA_ARGS__, " (", __FILE__, ":", __LINE__, ")")); \
    }                                                                                                                  \
  } while (false)
