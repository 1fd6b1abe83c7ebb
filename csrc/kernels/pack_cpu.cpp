// Chooses the kernels once; after that every call is a comparison and an indirect call (or memcpy).
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

#include "kernels/kernel_table.h"
#include "kernels/pack.h"

namespace torchddp::kernels {
namespace {

int capability_level(std::string_view capability) {
  constexpr std::string_view kLevels[] = {"generic", "avx2", "avx512"};
  for (int level = 0; level < 3; ++level) {
    if (kLevels[level] == capability) return level;
  }
  return -1;
}

constinit std::atomic<const KernelTable*> active{nullptr};

[[gnu::noinline, gnu::cold]] const KernelTable* initialize_table() {
  static const KernelTable* const chosen = table_for(std::getenv("TORCHDDP_CPU_CAPABILITY"));
  const KernelTable* expected = nullptr;
  active.compare_exchange_strong(expected, chosen, std::memory_order_release, std::memory_order_acquire);
  return expected == nullptr ? chosen : expected;
}

[[noreturn, gnu::noinline, gnu::cold]] void throw_opaque(DType dst_type, DType src_type, double scale) {
  throw std::invalid_argument("integer and bool elements can be copied, not scaled or cast: got source type " +
                              std::to_string(static_cast<int>(src_type)) + ", destination type " +
                              std::to_string(static_cast<int>(dst_type)) + ", scale " + std::to_string(scale));
}

}  // namespace

std::vector<const KernelTable*> supported_tables() {
  std::vector<const KernelTable*> tables;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      tables.push_back(&avx512_kernels);
    }
    tables.push_back(&avx2_kernels);
  }
#endif
  tables.push_back(&generic_kernels);
  return tables;
}

const KernelTable* table_for(const char* wanted) {
  int highest = capability_level("avx512");
  if (wanted != nullptr && *wanted != '\0') {
    const int level = capability_level(wanted);
    // A warning rather than an exception, because this may first run inside an autograd hook.
    if (level < 0) {
      std::fprintf(stderr, "torchddp: TORCHDDP_CPU_CAPABILITY='%s' is ignored: allowed are generic, avx2, avx512\n",
                   wanted);
    } else {
      highest = level;
    }
  }
  for (const KernelTable* table : supported_tables()) {
    if (capability_level(table->capability) <= highest) return table;
  }
  return &generic_kernels;
}

void set_active_table(const KernelTable* table) { active.store(table, std::memory_order_release); }

const KernelTable& active_table() {
  const KernelTable* current = active.load(std::memory_order_acquire);
  return current != nullptr ? *current : *initialize_table();
}

void scale_cast(void* dst, DType dst_type, const void* src, DType src_type, int64_t numel, double scale) {
  if (dst_type == src_type && scale == 1.0) {
    if (dst != src && numel > 0) std::memcpy(dst, src, static_cast<size_t>(numel * item_size(src_type)));
    return;
  }
  if (!is_float(dst_type) || !is_float(src_type)) throw_opaque(dst_type, src_type, scale);
  active_table().scale_cast[static_cast<size_t>(dst_type)][static_cast<size_t>(src_type)](dst, src, numel, scale);
}

const char* cpu_capability() { return active_table().capability; }

}  // namespace torchddp::kernels
