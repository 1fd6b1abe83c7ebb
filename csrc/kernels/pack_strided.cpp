// Strided views: orders and merges the dimensions, then passes the longest possible runs to scale_cast.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/pack.h"

namespace torchddp::kernels {
namespace {

struct Dim {
  int64_t size;
  int64_t dst_stride;
  int64_t src_stride;
};

// Dimensions from the outermost to the innermost.
struct Layout {
  Dim dims[kMaxDims];
  int num_dims = 0;
  bool empty = false;
};

int64_t magnitude(int64_t stride) { return stride < 0 ? -stride : stride; }

Layout make_layout(std::span<const int64_t> dst_strides, std::span<const int64_t> src_strides,
                   std::span<const int64_t> sizes) {
  if (sizes.size() > kMaxDims || dst_strides.size() != sizes.size() || src_strides.size() != sizes.size()) {
    throw std::invalid_argument("scale_cast_strided: got " + std::to_string(sizes.size()) + " sizes, " +
                                std::to_string(dst_strides.size()) + " destination strides and " +
                                std::to_string(src_strides.size()) +
                                " source strides; allowed are equal numbers, at most " + std::to_string(kMaxDims));
  }
  Layout layout;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] <= 0) layout.empty = true;
    if (sizes[i] == 1) continue;
    const Dim dim{sizes[i], dst_strides[i], src_strides[i]};
    // Insertion sort by destination stride, largest outermost: there are few dimensions, mostly sorted already.
    int at = layout.num_dims++;
    for (; at > 0 && magnitude(layout.dims[at - 1].dst_stride) < magnitude(dim.dst_stride); --at) {
      layout.dims[at] = layout.dims[at - 1];
    }
    layout.dims[at] = dim;
  }
  return layout;
}

// Merges an outer dimension with the next inner one where both views step through the two as through one.
void merge_dims(Layout& layout) {
  if (layout.num_dims == 0) return;
  int last = 0;
  for (int i = 1; i < layout.num_dims; ++i) {
    Dim& outer = layout.dims[last];
    const Dim& inner = layout.dims[i];
    if (outer.dst_stride == inner.dst_stride * inner.size && outer.src_stride == inner.src_stride * inner.size) {
      outer = {outer.size * inner.size, inner.dst_stride, inner.src_stride};
    } else {
      layout.dims[++last] = inner;
    }
  }
  layout.num_dims = last + 1;
}

template <class Word>
void copy_words(unsigned char* dst, int64_t dst_stride, const unsigned char* src, int64_t src_stride, int64_t numel) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Word));
  for (int64_t i = 0; i < numel; ++i) {
    std::memcpy(dst + i * dst_stride * kBytes, src + i * src_stride * kBytes, sizeof(Word));
  }
}

void copy_strided(unsigned char* dst, int64_t dst_stride, const unsigned char* src, int64_t src_stride, int64_t numel,
                  int64_t item_bytes) {
  switch (item_bytes) {
    case 1: return copy_words<uint8_t>(dst, dst_stride, src, src_stride, numel);
    case 2: return copy_words<uint16_t>(dst, dst_stride, src, src_stride, numel);
    case 4: return copy_words<uint32_t>(dst, dst_stride, src, src_stride, numel);
    default: return copy_words<uint64_t>(dst, dst_stride, src, src_stride, numel);
  }
}

class StridedPack {
 public:
  StridedPack(DType dst_type, DType src_type, double scale)
      : dst_type_(dst_type), src_type_(src_type), dst_bytes_(item_size(dst_type)), src_bytes_(item_size(src_type)),
        scale_(scale) {}

  // All elements of dims[0, num_dims), outermost first.
  void dims(unsigned char* dst, const unsigned char* src, const Dim* dims, int num_dims) const {
    if (num_dims == 1) return run(dst, src, dims[0]);
    if (num_dims == 2) return plane(dst, src, dims[0], dims[1]);
    for (int64_t i = 0; i < dims[0].size; ++i) {
      this->dims(dst + i * dims[0].dst_stride * dst_bytes_, src + i * dims[0].src_stride * src_bytes_, dims + 1,
                 num_dims - 1);
    }
  }

 private:
  // Where the source is dense along the outer dimension (a transposed matrix), long inner runs would touch each of its
  // cache lines once per element. Short ones let the lines stay in the cache for their other elements.
  void plane(unsigned char* dst, const unsigned char* src, const Dim& outer, const Dim& inner) const {
    const bool transposed = magnitude(outer.src_stride) < magnitude(inner.src_stride) && outer.src_stride != 0;
    const int64_t block = transposed ? kTransposedRun : inner.size;
    for (int64_t begin = 0; begin < inner.size; begin += block) {
      const Dim part{std::min(block, inner.size - begin), inner.dst_stride, inner.src_stride};
      unsigned char* part_dst = dst + begin * inner.dst_stride * dst_bytes_;
      const unsigned char* part_src = src + begin * inner.src_stride * src_bytes_;
      for (int64_t i = 0; i < outer.size; ++i) {
        run(part_dst + i * outer.dst_stride * dst_bytes_, part_src + i * outer.src_stride * src_bytes_, part);
      }
    }
  }

  void run(unsigned char* dst, const unsigned char* src, const Dim& dim) const {
    if (dim.dst_stride == 1 && dim.src_stride == 1) {
      scale_cast(dst, dst_type_, src, src_type_, dim.size, scale_);
    } else if (dst_type_ == src_type_ && scale_ == 1.0) {
      copy_strided(dst, dim.dst_stride, src, dim.src_stride, dim.size, src_bytes_);
    } else {
      staged_run(dst, src, dim);
    }
  }

  // Gathers into a small contiguous buffer, so that only the vectorized conversion is needed.
  void staged_run(unsigned char* dst, const unsigned char* src, const Dim& dim) const {
    alignas(64) unsigned char gathered[kStagedRun * 8];
    alignas(64) unsigned char scaled[kStagedRun * 8];
    for (int64_t begin = 0; begin < dim.size; begin += kStagedRun) {
      const int64_t numel = std::min(kStagedRun, dim.size - begin);
      const unsigned char* run_src = src + begin * dim.src_stride * src_bytes_;
      unsigned char* run_dst = dst + begin * dim.dst_stride * dst_bytes_;
      if (dim.src_stride != 1) {
        copy_strided(gathered, 1, run_src, dim.src_stride, numel, src_bytes_);
        run_src = gathered;
      }
      scale_cast(dim.dst_stride == 1 ? run_dst : scaled, dst_type_, run_src, src_type_, numel, scale_);
      if (dim.dst_stride != 1) copy_strided(run_dst, dim.dst_stride, scaled, 1, numel, dst_bytes_);
    }
  }

  static constexpr int64_t kTransposedRun = 64;
  static constexpr int64_t kStagedRun = 256;

  DType dst_type_;
  DType src_type_;
  int64_t dst_bytes_;
  int64_t src_bytes_;
  double scale_;
};

}  // namespace

void scale_cast_strided(void* dst, DType dst_type, std::span<const int64_t> dst_strides, const void* src,
                        DType src_type, std::span<const int64_t> src_strides, std::span<const int64_t> sizes,
                        double scale) {
  Layout layout = make_layout(dst_strides, src_strides, sizes);
  if (layout.empty) return;
  merge_dims(layout);
  if (layout.num_dims == 0) return scale_cast(dst, dst_type, src, src_type, 1, scale);
  StridedPack(dst_type, src_type, scale)
      .dims(static_cast<unsigned char*>(dst), static_cast<const unsigned char*>(src), layout.dims, layout.num_dims);
}

}  // namespace torchddp::kernels
