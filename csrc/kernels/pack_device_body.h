// The bodies of the device's pack kernels: what one thread of one block does. Host/device functions over plain structs, so that
// tests loop the same code over blocks and threads on the CPU, under ASan and UBSan.
//
// Note [Work of the device kernels]
// A launch copies `count` pieces, each contiguous at both ends. A piece is cut into tiles; the tiles of all pieces are numbered
// through, and each block takes an equal slice of them, so that one huge tensor among a thousand small ones keeps no block
// waiting. A block finds its first piece by binary search over `first_tile`; everything it reads of the table lies in
// the kernel's parameters (constant memory, broadcast to the block).
//
// Tiles are laid out over the destination's 16-byte grid, not from the piece's first element: `lead` is how many elements the
// piece begins after such a boundary. So every vector of a tile is stored by 16-byte accesses, but for the first and last of a
// piece, which go element by element. Loads are 16-byte accesses too where the source lies on its grid when the destination
// does, otherwise by element (neighboring threads read neighboring memory all the same).
//
// A thread reads the elements of a vector before it writes them and nobody else touches them: in place (source == destination)
// is safe. Pointers must be aligned to their element size.
#pragma once

#include <cstdint>

#include "kernels/float_bits.h"

// Other compilers don't know this pragma, including nvcc's host compiler.
#if defined(__CUDA_ARCH__)
#define TDDP_UNROLL _Pragma("unroll")
#define TDDP_NO_UNROLL _Pragma("unroll 1")
#else
#define TDDP_UNROLL
#define TDDP_NO_UNROLL
#endif

namespace torchddp::kernels::device {

inline constexpr int kThreads = 256;  // of a block
inline constexpr int kAccessBytes = 16;
// What a thread reads or writes of a tile, at the wider end: four accesses in flight.
inline constexpr int kThreadBytes = 4 * kAccessBytes;

// The parameters of a kernel. The capacities are chosen in pack_device_plan.h.
template <int kCapacity>
struct PieceTable {
  const unsigned char* src[kCapacity];
  unsigned char* dst[kCapacity];
  int64_t numel[kCapacity];  // > 0
  double scale;
  uint32_t first_tile[kCapacity + 1];  // [count] is the number of tiles
  int32_t count;
};

// How a tile is laid out. All counts are elements.
template <DType Dst, DType Src>
struct Tiling {
  static constexpr int kDstBytes = static_cast<int>(item_size(Dst));
  static constexpr int kSrcBytes = static_cast<int>(item_size(Src));
  static constexpr int kWider = kDstBytes > kSrcBytes ? kDstBytes : kSrcBytes;
  static constexpr int kNarrower = kDstBytes < kSrcBytes ? kDstBytes : kSrcBytes;
  static constexpr int kVector = kAccessBytes / kNarrower;
  static constexpr int kVectorsPerThread = kThreadBytes / (kVector * kWider);
  static constexpr int kRow = kThreads * kVector;  // one vector of every thread
  static constexpr int kTile = kRow * kVectorsPerThread;
  static constexpr int kDstWords = kVector * kDstBytes / 4;
  static constexpr int kSrcWords = kVector * kSrcBytes / 4;
};

TDDP_HOST_DEVICE constexpr int64_t tile_elements(int64_t wider_item_size) {
  return kThreads * kThreadBytes / wider_item_size;
}

// Elements between the 16-byte boundary at or before `dst` and `dst`.
TDDP_ALWAYS_INLINE int64_t lead_elements(const void* dst, int64_t dst_item_size) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(dst) % kAccessBytes) / dst_item_size;
}

// One access. Its words are elements of any type.
struct __attribute__((may_alias, aligned(16))) Access {
  uint32_t words[4];
};
static_assert(sizeof(Access) == kAccessBytes && alignof(Access) == kAccessBytes, "an access is one instruction");

template <int kWords>
TDDP_ALWAYS_INLINE void load_vector(uint32_t (&words)[kWords], const unsigned char* src) {
  TDDP_UNROLL
  for (int i = 0; i < kWords / 4; ++i) {
#if defined(__CUDA_ARCH__)  // or else nvcc 13.0 splits it for sm_100 where its words are joined to doubles
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[4 * i]), "=r"(words[4 * i + 1]), "=r"(words[4 * i + 2]), "=r"(words[4 * i + 3])
                 : "l"(src + i * kAccessBytes));
#else
    const Access access = reinterpret_cast<const Access*>(src)[i];
    for (int j = 0; j < 4; ++j) words[4 * i + j] = access.words[j];
#endif
  }
}

template <int kWords>
TDDP_ALWAYS_INLINE void store_vector(unsigned char* dst, const uint32_t (&words)[kWords]) {
  TDDP_UNROLL
  for (int i = 0; i < kWords / 4; ++i) {
    reinterpret_cast<Access*>(dst)[i] = {{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]}};
  }
}

template <int kBytes>
struct Element {
  typedef Bits<kBytes> __attribute__((may_alias)) Word;

  static TDDP_ALWAYS_INLINE Bits<kBytes> load(const unsigned char* src) { return *reinterpret_cast<const Word*>(src); }
  static TDDP_ALWAYS_INLINE void store(unsigned char* dst, Bits<kBytes> bits) { *reinterpret_cast<Word*>(dst) = bits; }

  // Element `index` of a vector in registers, little-endian. `put` expects zeros there.
  static TDDP_ALWAYS_INLINE Bits<kBytes> get(const uint32_t* words, int index) {
    if constexpr (kBytes == 8) {
      return words[2 * index] | static_cast<uint64_t>(words[2 * index + 1]) << 32;
    } else {
      constexpr int kPerWord = 4 / kBytes;
      return static_cast<Bits<kBytes>>(words[index / kPerWord] >> (index % kPerWord * kBytes * 8));
    }
  }
  static TDDP_ALWAYS_INLINE void put(uint32_t* words, int index, Bits<kBytes> bits) {
    if constexpr (kBytes == 8) {
      words[2 * index] = static_cast<uint32_t>(bits);
      words[2 * index + 1] = static_cast<uint32_t>(bits >> 32);
    } else {
      constexpr int kPerWord = 4 / kBytes;
      words[index / kPerWord] |= static_cast<uint32_t>(bits) << (index % kPerWord * kBytes * 8);
    }
  }
};

// The first tile of a block; slices differ by at most one tile.
TDDP_ALWAYS_INLINE uint32_t slice_begin(uint32_t num_tiles, uint32_t num_blocks, uint32_t block) {
  const uint32_t longer = num_tiles % num_blocks;
  return num_tiles / num_blocks * block + (block < longer ? block : longer);
}

// The piece that `tile` belongs to.
template <int kCapacity>
TDDP_ALWAYS_INLINE int find_piece(const PieceTable<kCapacity>& table, uint32_t tile) {
  int low = 0;
  int high = table.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.first_tile[middle] <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// One kernel. Opaque words, and anything neither scaled nor cast, are copied as integers of their size.
template <DType Dst, DType Src>
struct Pack {
  static constexpr bool kCopy = !is_float(Dst);
  static_assert(kCopy ? Dst == Src : is_float(Src), "opaque words are copied");
  using Layout = Tiling<Dst, Src>;
  using Factor = std::conditional_t<kCopy, int, Product<Dst, Src>>;  // unused for a copy
  using Target = Element<Layout::kDstBytes>;
  using Source = Element<Layout::kSrcBytes>;

  static TDDP_ALWAYS_INLINE Bits<item_size(Dst)> convert(Bits<item_size(Src)> bits, Factor factor) {
    if constexpr (kCopy) {
      return bits;
    } else {
      return to_bits<Dst, Factor>(from_bits<Src, Factor>(bits) * factor);
    }
  }

  static TDDP_ALWAYS_INLINE void convert_vector(unsigned char* dst, const uint32_t (&in)[Layout::kSrcWords],
                                                Factor factor) {
    if constexpr (kCopy) {
      store_vector(dst, in);
    } else {
      uint32_t out[Layout::kDstWords] = {};
      TDDP_UNROLL
      for (int i = 0; i < Layout::kVector; ++i) Target::put(out, i, convert(Source::get(in, i), factor));
      store_vector(dst, out);
    }
  }

  // The vector that begins at element `at`, of which only [0, numel) belong to the piece.
  static TDDP_ALWAYS_INLINE void run_vector(unsigned char* dst, const unsigned char* src, int64_t numel, int64_t at,
                                            bool src_on_grid, Factor factor) {
    if (at >= 0 && at + Layout::kVector <= numel) {
      uint32_t in[Layout::kSrcWords] = {};
      const unsigned char* from = src + at * Layout::kSrcBytes;
      if (src_on_grid) {
        load_vector(in, from);
      } else {
        TDDP_UNROLL
        for (int i = 0; i < Layout::kVector; ++i) Source::put(in, i, Source::load(from + i * Layout::kSrcBytes));
      }
      convert_vector(dst + at * Layout::kDstBytes, in, factor);
      return;
    }
    const int64_t end = at + Layout::kVector < numel ? at + Layout::kVector : numel;
    TDDP_NO_UNROLL
    for (int64_t i = at > 0 ? at : 0; i < end; ++i) {
      Target::store(dst + i * Layout::kDstBytes, convert(Source::load(src + i * Layout::kSrcBytes), factor));
    }
  }

  // The work of `thread` on one tile of a piece.
  static TDDP_ALWAYS_INLINE void run_tile(unsigned char* dst, const unsigned char* src, int64_t numel, uint32_t tile,
                                          int thread, Factor factor) {
    const int64_t lead = lead_elements(dst, Layout::kDstBytes);
    const int64_t begin = static_cast<int64_t>(tile) * Layout::kTile - lead;  // negative: before the piece
    const int64_t first = begin + thread * Layout::kVector;
    const bool src_on_grid =
        (reinterpret_cast<uintptr_t>(src) - static_cast<uintptr_t>(lead * Layout::kSrcBytes)) % kAccessBytes == 0;
    if (src_on_grid && begin >= 0 && begin + Layout::kTile <= numel) {
      // All loads come before the first store. The compiler can't reorder them, because source and destination may be the same.
      uint32_t in[Layout::kVectorsPerThread][Layout::kSrcWords];
      TDDP_UNROLL
      for (int v = 0; v < Layout::kVectorsPerThread; ++v) {
        load_vector(in[v], src + (first + v * Layout::kRow) * Layout::kSrcBytes);
      }
      TDDP_UNROLL
      for (int v = 0; v < Layout::kVectorsPerThread; ++v) {
        convert_vector(dst + (first + v * Layout::kRow) * Layout::kDstBytes, in[v], factor);
      }
      return;
    }
    TDDP_NO_UNROLL
    for (int v = 0; v < Layout::kVectorsPerThread; ++v) {
      run_vector(dst, src, numel, first + v * Layout::kRow, src_on_grid, factor);
    }
  }

  // All the work of `thread` of `block`.
  template <int kCapacity>
  static TDDP_ALWAYS_INLINE void run_thread(const PieceTable<kCapacity>& table, uint32_t num_blocks, uint32_t block,
                                            int thread) {
    const uint32_t num_tiles = table.first_tile[table.count];
    const uint32_t end = slice_begin(num_tiles, num_blocks, block + 1);
    const auto factor = static_cast<Factor>(table.scale);
    uint32_t tile = slice_begin(num_tiles, num_blocks, block);
    for (int piece = find_piece(table, tile); tile < end; ++piece) {
      const uint32_t first = table.first_tile[piece];
      const uint32_t last = table.first_tile[piece + 1];
      const uint32_t stop = last < end ? last : end;
      for (; tile < stop; ++tile) {
        run_tile(table.dst[piece], table.src[piece], table.numel[piece], tile - first, thread, factor);
      }
    }
  }
};

}  // namespace torchddp::kernels::device
