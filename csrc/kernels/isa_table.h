// The table of an instruction set: every body for every type. For isa_*.cpp alone, see isa.h.
#pragma once

#include <array>

#include "kernels/checks_body.h"
#include "kernels/compress_body.h"
#include "kernels/kernel_table.h"
#include "kernels/sum_body.h"

namespace torchddp::kernels {
namespace {

// kernel.operator()<value>() of each value.
template <auto... kValues, class Kernel>
constexpr auto each(Kernel kernel) {
  return std::array{kernel.template operator()<kValues>()...};
}

template <class Kernel>
constexpr auto each_float(Kernel kernel) {
  return each<DType::kF64, DType::kF32, DType::kF16, DType::kBF16>(kernel);
}

// In the order of Format.
template <class... Formats>
constexpr auto compressors() {
  return std::array{std::array{&Formats::template compress<false>, &Formats::template compress<true>}...};
}

template <class... Formats>
constexpr auto decompressors() {
  return std::array{std::array{&Formats::template decompress<false>, &Formats::template decompress<true>}...};
}

template <class Isa>
constexpr KernelTable make_table(const char* capability) {
  using enum DType;
  using enum ReduceOp;
  using Int8 = Quantized<Isa, Format::kInt8>;
  using Int4 = Quantized<Isa, Format::kInt4>;
  using Fp16 = Halves<Isa, kF16>;
  using Bf16 = Halves<Isa, kBF16>;
  return {
      .capability = capability,
      .scale_cast = each_float(
          []<DType Dst>() { return each_float([]<DType Src>() { return &Isa::template scale_cast<Dst, Src>; }); }),
      .reduce = each<kF64, kF32, kF16, kBF16, kI8, kU8, kI16, kI32, kI64>([]<DType Type>() {
        return each<kSum, kMin, kMax>(
            []<ReduceOp Op>() { return &SumKernel<Isa, Type, Op>::template run<false, false>; });
      }),
      .scaled_sum =
          each<kF64, kF32>([]<DType Type>() { return &SumKernel<Isa, Type, kSum>::template run<true, false>; }),
      .checked_sum = each_float([]<DType Type>() { return &SumKernel<Isa, Type, kSum>::template run<false, true>; }),
      .checked_scaled_sum =
          each<kF64, kF32>([]<DType Type>() { return &SumKernel<Isa, Type, kSum>::template run<true, true>; }),
      .compress = compressors<Int8, Int4, Fp16, Bf16>(),
      .decompress = decompressors<Int8, Int4, Fp16, Bf16>(),
      .hash_blocks = &HashKernel<Isa>::run,
      .any_non_finite = each_float([]<DType Src>() { return &FiniteKernel<Isa, Src>::run; }),
  };
}

}  // namespace
}  // namespace torchddp::kernels
