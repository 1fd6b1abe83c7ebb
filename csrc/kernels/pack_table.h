// Inside of the kernels: one table per instruction set, of the contiguous pack, the sum, the compression
// kernels and those that check memory. Not for use outside kernels/ and its tests.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kernels/pack.h"

namespace torchddp::kernels {

// dst[i] = cast(src[i] * scale), types and instruction set fixed.
using ScaleCastFn = void (*)(void* dst, const void* src, int64_t numel, double scale);

struct SumTable;       // sum_table.h
struct CompressTable;  // compress_table.h
struct CheckTable;     // check_table.h

struct KernelTable {
  const char* capability;
  std::array<std::array<ScaleCastFn, kNumFloatTypes>, kNumFloatTypes> scale_cast;  // [destination][source]
  const SumTable* sums;
  const CompressTable* compress;
  const CheckTable* checks;
};

// All sixteen instantiations of a class template with a static member `run`, in the order of DType.
template <template <DType, DType> class Kernel>
constexpr KernelTable make_table(const char* capability, const SumTable& sums, const CompressTable& compress,
                                 const CheckTable& checks) {
  using enum DType;
  return {
      capability,
      {{{&Kernel<kF64, kF64>::run, &Kernel<kF64, kF32>::run, &Kernel<kF64, kF16>::run, &Kernel<kF64, kBF16>::run},
        {&Kernel<kF32, kF64>::run, &Kernel<kF32, kF32>::run, &Kernel<kF32, kF16>::run, &Kernel<kF32, kBF16>::run},
        {&Kernel<kF16, kF64>::run, &Kernel<kF16, kF32>::run, &Kernel<kF16, kF16>::run, &Kernel<kF16, kBF16>::run},
        {&Kernel<kBF16, kF64>::run, &Kernel<kBF16, kF32>::run, &Kernel<kBF16, kF16>::run, &Kernel<kBF16, kBF16>::run}}},
      &sums,
      &compress,
      &checks};
}

// The table of an instruction set; null where the binary or the processor lacks it.
const KernelTable* generic_table();
const KernelTable* avx2_table();
const KernelTable* avx512_table();

// The table in use.
const KernelTable& active_table();

// What this processor can run, best first; the last is always "generic".
std::vector<std::string_view> supported_capabilities();

// What TORCHDDP_CPU_CAPABILITY=`wanted` chooses on this processor; null and "" set no limit.
const char* choose_capability(const char* wanted);

// Switches the kernels of the whole process, so that one test run covers every instruction set. Returns false, and
// changes nothing, if `capability` is not supported here. Must not run at the same time as a kernel whose result
// matters.
bool set_cpu_capability(std::string_view capability);

}  // namespace torchddp::kernels
