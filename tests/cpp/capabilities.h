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
  for (const KernelTable* table : supported_tables()) {
    set_active_table(table);
    CHECK_EQ(std::string_view(cpu_capability()), table->capability);
    body();
  }
  set_active_table(supported_tables().front());
}

}  // namespace torchddp::kernels
