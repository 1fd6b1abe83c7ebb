// Kernels on every instruction set of this processor.
#pragma once

#include <string_view>

#include "check.h"
#include "kernels/kernel_table.h"
#include "kernels/pack.h"

namespace torchddp::kernels {

// Runs `body` once per instruction set.
template <class Body>
void for_each_capability(const Body& body) {
  for (const std::string_view capability : supported_capabilities()) {
    CHECK(set_cpu_capability(capability));
    CHECK_EQ(std::string_view(cpu_capability()), capability);
    body();
  }
  set_cpu_capability(supported_capabilities().front());
}

}  // namespace torchddp::kernels
