#include "bucket/tensor_checks.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstddef>
#include <map>

#include "bucket/kernel_type.h"
#include "bucket/parallel.h"
#include "common/check.h"
#include "kernels/hash.h"
#include "kernels/non_finite.h"
#include "kernels/pack.h"

namespace torchddp::bucket {
namespace {

constexpr int64_t kHashedAtOnce = 4 * 1024 * 1024;  // elements, by operators

at::Tensor plain_values(const at::Tensor& tensor) {
  auto values = tensor.detach().resolve_conj().resolve_neg();
  return values.is_complex() ? at::view_as_real(values) : values;
}

at::ScalarType word_type(int64_t itemsize) {
  switch (itemsize) {
    case 1:
      return at::kChar;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    default:
      return at::kLong;
  }
}

// word ^= word >> bits, as if unsigned.
void fold(at::Tensor& word, int64_t bits) {
  word.bitwise_xor_(at::bitwise_right_shift(word, bits).bitwise_and_((int64_t{1} << (64 - bits)) - 1));
}

// A bijection of each word, another one in each place, and the sum of all: 0-d, kLong, on the tensor's device.
at::Tensor hash_by_operators(const at::Tensor& tensor) {
  constexpr auto kPlace = static_cast<int64_t>(0x9E3779B97F4A7C15u);
  constexpr auto kFirst = static_cast<int64_t>(0xBF58476D1CE4E5B9u);
  constexpr auto kSecond = static_cast<int64_t>(0x94D049BB133111EBu);
  const auto words = plain_values(tensor).contiguous().view({-1});
  const auto as_integers = words.view(word_type(words.itemsize()));
  auto sum = at::zeros({}, tensor.options().dtype(at::kLong));
  for (int64_t begin = 0; begin < words.numel(); begin += kHashedAtOnce) {
    const auto count = std::min(kHashedAtOnce, words.numel() - begin);
    auto part = at::arange(begin + 1, begin + 1 + count, sum.options()).mul_(kPlace);
    part.add_(as_integers.narrow(0, begin, count));
    fold(part, 30);
    part.mul_(kFirst);
    fold(part, 27);
    part.mul_(kSecond);
    fold(part, 31);
    sum.add_(part.sum());
  }
  return sum;
}

int64_t hash_on_cpu(const at::Tensor& tensor) {
  const bool as_it_is = tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
  const auto values = as_it_is ? tensor : plain_values(tensor).contiguous();
  return static_cast<int64_t>(kernels::hash_bytes(values.const_data_ptr(), static_cast<int64_t>(values.nbytes())));
}

}  // namespace

int64_t count_non_finite(const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  if (!tensor.is_floating_point() && !tensor.is_complex()) {
    return 0;
  }
  auto values = plain_values(tensor);
  const auto dtype = kernel_type(values.scalar_type()).dtype;
  if (!values.device().is_cpu() || !kernels::is_float(dtype)) {  // opaque: a float type that the kernels don't know
    return values.isfinite().logical_not().sum().item<int64_t>();
  }
  if (!values.is_non_overlapping_and_dense()) {
    values = values.contiguous();
  }
  const auto* const data = static_cast<const std::byte*>(values.const_data_ptr());
  return sum_of_parts(values.numel(), [&](int64_t begin, int64_t end) {
    return kernels::count_non_finite(data + begin * kernels::item_size(dtype), dtype, end - begin);
  });
}

double sum_of_squares(const at::Tensor& tensor) {
  constexpr int64_t kChunk = 1024;  // in doubles, half of the first-level cache at most
  constexpr int64_t kLanes = 16;
  const auto dtype = kernel_type(tensor.scalar_type()).dtype;
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  double sum = 0;
  for (int64_t begin = 0; begin < tensor.numel(); begin += kChunk) {
    const int64_t count = std::min(kChunk, tensor.numel() - begin);
    double values[kChunk];
    kernels::scale_cast(values, kernels::DType::kF64, data + begin * kernels::item_size(dtype), dtype, count, 1.0);
    std::fill(values + count, values + kChunk, 0.0);
    double lanes[kLanes] = {};
    for (int64_t i = 0; i < kChunk; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        lanes[lane] += values[i + lane] * values[i + lane];
      }
    }
    for (int64_t stride = kLanes / 2; stride > 0; stride /= 2) {
      for (int64_t lane = 0; lane < stride; ++lane) {
        lanes[lane] += lanes[lane + stride];
      }
    }
    sum += lanes[0];
  }
  return sum;
}

std::vector<int64_t> hash_tensors(const std::vector<at::Tensor>& tensors, bool by_operators) {
  const c10::NoGradGuard no_grad;
  std::vector<int64_t> hashes(tensors.size());
  std::map<c10::DeviceIndex, std::vector<size_t>> elsewhere;
  std::vector<at::Tensor> sums(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    TDDP_CHECK(tensor.layout() == at::kStrided && !tensor.is_meta(), "tensor ", i, " has no memory to hash: got ",
               tensor.layout(), " on ", tensor.device());
    if (tensor.device().is_cpu() && !by_operators) {
      hashes[i] = hash_on_cpu(tensor);
    } else {
      sums[i] = hash_by_operators(tensor);
      elsewhere[tensor.device().index()].push_back(i);
    }
  }
  for (const auto& [device, indices] : elsewhere) {
    std::vector<at::Tensor> of_device;
    for (const auto i : indices) {
      of_device.push_back(sums[i]);
    }
    const auto on_host = at::stack(of_device).cpu();
    for (size_t k = 0; k < indices.size(); ++k) {
      const auto i = indices[k];
      // The length too: zeros at the end must count.
      const uint64_t words[] = {static_cast<uint64_t>(on_host.const_data_ptr<int64_t>()[k]), tensors[i].nbytes()};
      hashes[i] = static_cast<int64_t>(kernels::hash_bytes(words, sizeof(words)));
    }
  }
  return hashes;
}

}  // namespace torchddp::bucket
