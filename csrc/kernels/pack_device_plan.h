// Plans the launches of a pack or unpack on the device: checks, kernel, chunks of pieces, tiles, blocks. Host code without
// CUDA, so that tests can run it. Internal to kernels/ and its tests.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/round_up.h"
#include "kernels/pack_cuda.h"
#include "kernels/pack_device_body.h"

namespace torchddp::kernels::device {

// Kernel parameters used to be limited to 4 KB; since CUDA 12.1, from compute capability 7.0 on, the limit is 32,764 bytes.
// Parameters are copied with every launch, so the smallest sufficient table is used.
inline constexpr int kFewPieces = 144;
inline constexpr int kSomePieces = 416;
inline constexpr int kMaxPieces = 1168;
static_assert(sizeof(PieceTable<kFewPieces>) <= 4096, "the small table must fit the parameters of any kernel");
static_assert(kFewPieces < kSomePieces && kSomePieces < kMaxPieces);
static_assert(sizeof(PieceTable<kMaxPieces>) <= 32764, "the large table must fit the parameters of a kernel");

// The largest grid: several times what the largest device runs at once, so that the last blocks to finish are a small part of
// all.
inline constexpr uint32_t kMaxBlocks = 4096;

inline constexpr int kInvalidValue = 1;  // cudaErrorInvalidValue

struct PackJob {
  Direction direction;
  void* flat;
  DType flat_type;
  const DevicePiece* pieces;
  int64_t count;
  DType outside_type;
  double scale;

  DType dst_type() const { return direction == Direction::kPack ? flat_type : outside_type; }
  DType src_type() const { return direction == Direction::kPack ? outside_type : flat_type; }
  bool is_copy() const { return flat_type == outside_type && scale == 1.0; }
  int64_t tile_elements() const {
    const int64_t flat_size = item_size(flat_type);
    const int64_t outside_size = item_size(outside_type);
    return device::tile_elements(flat_size > outside_size ? flat_size : outside_size);
  }
  unsigned char* flat_at(const DevicePiece& piece) const {
    return static_cast<unsigned char*>(flat) + piece.begin * item_size(flat_type);
  }
  void* dst(const DevicePiece& piece) const { return direction == Direction::kPack ? flat_at(piece) : piece.outside; }
  const void* src(const DevicePiece& piece) const {
    return direction == Direction::kPack ? piece.outside : flat_at(piece);
  }
  int64_t num_tiles(const DevicePiece& piece) const {
    const int64_t lead = lead_elements(dst(piece), item_size(dst_type()));
    return ceil_div(lead + piece.numel, tile_elements());
  }
};

// More elements of the largest type than any device's memory holds; keeps the sums above from overflowing.
inline constexpr int64_t kMaxNumel = int64_t{1} << 48;

inline bool is_aligned(const void* pointer, DType dtype) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(item_size(dtype)) == 0;
}

inline bool is_valid(const PackJob& job, const DevicePiece& piece) {
  if (piece.numel == 0) return true;
  return piece.numel > 0 && piece.numel <= kMaxNumel && piece.begin >= 0 && piece.begin <= kMaxNumel &&
         piece.outside != nullptr && job.flat != nullptr && is_aligned(piece.outside, job.outside_type);
}

inline bool is_valid(const PackJob& job) {
  if (!job.is_copy() && (!is_float(job.flat_type) || !is_float(job.outside_type))) return false;
  if (job.count < 0 || !is_aligned(job.flat, job.flat_type)) return false;
  int64_t num_tiles = 0;
  for (int64_t i = 0; i < job.count; ++i) {
    if (!is_valid(job, job.pieces[i])) return false;
    if (job.pieces[i].numel > 0) num_tiles += job.num_tiles(job.pieces[i]);
    if (num_tiles > UINT32_MAX) return false;
  }
  return true;
}

template <DType Dst, class Visit>
auto visit_cast(DType src_type, const Visit& visit) {
  switch (src_type) {
    case DType::kF64: return visit(Pack<Dst, DType::kF64>{});
    case DType::kF32: return visit(Pack<Dst, DType::kF32>{});
    case DType::kF16: return visit(Pack<Dst, DType::kF16>{});
    default: return visit(Pack<Dst, DType::kBF16>{});
  }
}

// Returns visit() of the Pack<Dst, Src> that does the job.
template <class Visit>
auto visit_kernel(const PackJob& job, const Visit& visit) {
  if (job.is_copy()) {
    switch (item_size(job.dst_type())) {
      case 1: return visit(Pack<DType::kU8, DType::kU8>{});
      case 2: return visit(Pack<DType::kI16, DType::kI16>{});
      case 4: return visit(Pack<DType::kI32, DType::kI32>{});
      default: return visit(Pack<DType::kI64, DType::kI64>{});
    }
  }
  switch (job.dst_type()) {
    case DType::kF64: return visit_cast<DType::kF64>(job.src_type(), visit);
    case DType::kF32: return visit_cast<DType::kF32>(job.src_type(), visit);
    case DType::kF16: return visit_cast<DType::kF16>(job.src_type(), visit);
    default: return visit_cast<DType::kBF16>(job.src_type(), visit);
  }
}

// Fills `table` with as many non-empty pieces as fit, starting at `next`; returns where the rest begins.
template <int kCapacity>
int64_t fill_table(PieceTable<kCapacity>& table, const PackJob& job, int64_t next) {
  table.scale = job.scale;
  table.count = 0;
  table.first_tile[0] = 0;
  for (; next < job.count && table.count < kCapacity; ++next) {
    const DevicePiece& piece = job.pieces[next];
    if (piece.numel == 0) continue;
    const int32_t i = table.count++;
    table.src[i] = static_cast<const unsigned char*>(job.src(piece));
    table.dst[i] = static_cast<unsigned char*>(job.dst(piece));
    table.numel[i] = piece.numel;
    table.first_tile[i + 1] = table.first_tile[i] + static_cast<uint32_t>(job.num_tiles(piece));
  }
  return next;
}

// The launches of a job, in order. launch(table, num_blocks) returns an error, or 0 to continue.
template <class Launch>
int for_each_launch(const PackJob& job, const Launch& launch) {
  if (!is_valid(job)) return kInvalidValue;
  int64_t left = 0;
  for (int64_t i = 0; i < job.count; ++i) left += job.pieces[i].numel > 0 ? 1 : 0;
  int64_t next = 0;
  const auto launch_some = [&](auto capacity) {
    PieceTable<decltype(capacity)::value> table;
    next = fill_table(table, job, next);
    left -= table.count;
    const uint32_t num_tiles = table.first_tile[table.count];
    return launch(table, num_tiles < kMaxBlocks ? num_tiles : kMaxBlocks);
  };
  while (left > 0) {
    const int error = left <= kFewPieces    ? launch_some(std::integral_constant<int, kFewPieces>())
                      : left <= kSomePieces ? launch_some(std::integral_constant<int, kSomePieces>())
                                            : launch_some(std::integral_constant<int, kMaxPieces>());
    if (error != 0) return error;
  }
  return 0;
}

}  // namespace torchddp::kernels::device
