#include "transport/tensor_broadcast.h"

#include <ATen/Functions.h>
#include <ATen/ops/_foreach_copy.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>

#include "common/errors.h"
#include "common/round_up.h"

namespace torchddp::transport {
namespace {

// From this size on a copy costs more than a separate message.
constexpr int64_t kAloneBytes = 1 << 20;
// How much is copied through shared memory at a time.
constexpr int64_t kPieceBytes = 4 << 20;
// Every dtype's alignment.
constexpr int64_t kAlignment = 16;

int64_t padded_bytes(const at::Tensor& tensor) { return round_up(static_cast<int64_t>(tensor.nbytes()), kAlignment); }

bool is_plain_bytes(const at::Tensor& tensor) { return tensor.device().is_cpu() && tensor.is_contiguous(); }

}  // namespace

TensorBroadcast::TensorBroadcast(std::shared_ptr<Transport> transport, int64_t message_bytes,
                                 std::chrono::milliseconds timeout)
    : transport_(std::move(transport)),
      message_bytes_(transport_->capabilities().reaches_any_memory ? message_bytes
                                                                   : std::min(message_bytes, kPieceBytes)),
      timeout_(timeout) {}

TensorBroadcast::Sending TensorBroadcast::sending(const at::Tensor& tensor) const {
  const auto bytes = padded_bytes(tensor);
  if (!transport_->capabilities().reaches_any_memory && tensor.device().is_cpu()) {
    return bytes > message_bytes_ ? Sending::kInPieces : Sending::kTogether;
  }
  return bytes >= kAloneBytes && tensor.is_contiguous() ? Sending::kAlone : Sending::kTogether;
}

void TensorBroadcast::reserve(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += padded_bytes(tensor);
  if (!transport_->capabilities().reaches_any_memory && bytes > 0) {
    make_room(std::min(bytes, message_bytes_), tensors.front().device());
  }
}

void TensorBroadcast::make_room(int64_t bytes, at::Device device) {
  if (!flat_.defined() || flat_.numel() < bytes || flat_.device() != device) {
    // Registered memory is expensive, and a message does not need it.
    flat_ = transport_->capabilities().reaches_any_memory
                ? at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device))
                : transport_->allocate(bytes, at::kByte, device);
    places_.clear();
  }
}

void TensorBroadcast::run(const std::vector<at::Tensor>& tensors, int root) {
  // Below autograd: neither version counters nor graphs need to know.
  const c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const c10::NoGradGuard no_grad;
  size_t begin = 0;
  int64_t bytes = 0;
  const auto send_collected = [&](size_t end) {
    if (bytes > 0) run_together(std::span(tensors).subspan(begin, end - begin), bytes, root);
    begin = end;
    bytes = 0;
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto more = padded_bytes(tensors[i]);
    const auto sending = this->sending(tensors[i]);
    if (sending != Sending::kTogether || bytes + more > message_bytes_) send_collected(i);
    if (sending == Sending::kTogether) {
      bytes += more;
      continue;
    }
    if (sending == Sending::kAlone) {
      run_alone(tensors[i], root);
    } else {
      run_in_pieces(tensors[i], root);
    }
    begin = i + 1;
  }
  send_collected(tensors.size());
}

void TensorBroadcast::run_in_pieces(const at::Tensor& tensor, int root) {
  const auto plain = tensor.contiguous();
  const bool is_root = transport_->rank() == root;
  const auto total = static_cast<int64_t>(plain.nbytes());
  make_room(std::min(total, message_bytes_), tensor.device());
  auto* data = static_cast<std::byte*>(plain.mutable_data_ptr());
  for (int64_t offset = 0; offset < total; offset += message_bytes_) {
    const auto piece = flat_.narrow(0, 0, std::min(message_bytes_, total - offset));
    if (is_root) std::memcpy(piece.mutable_data_ptr(), data + offset, piece.nbytes());
    send(piece, root);
    if (!is_root) std::memcpy(data + offset, piece.const_data_ptr(), piece.nbytes());
  }
  if (!is_root && !plain.is_same(tensor)) tensor.copy_(plain);
}

void TensorBroadcast::run_alone(const at::Tensor& tensor, int root) {
  const auto real = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  send(real.detach().view({-1}).view(at::kByte), root);
}

at::Tensor& TensorBroadcast::place(size_t index, const at::Tensor& message, int64_t offset, const at::Tensor& tensor) {
  if (places_.size() <= index) places_.resize(index + 1);
  auto& place = places_[index];
  const auto* const data = static_cast<const std::byte*>(message.const_data_ptr()) + offset;
  if (!place.defined() || place.const_data_ptr() != data || place.scalar_type() != tensor.scalar_type() ||
      place.sizes() != tensor.sizes()) {
    place = message.narrow(0, offset, static_cast<int64_t>(tensor.nbytes()))
                .view(tensor.scalar_type())
                .view(tensor.sizes());
  }
  return place;
}

void TensorBroadcast::run_together(std::span<const at::Tensor> tensors, int64_t bytes, int root) {
  make_room(bytes, tensors.front().device());
  const auto message = flat_.narrow(0, 0, bytes);
  const bool is_root = transport_->rank() == root;
  std::vector<at::Tensor> places;
  std::vector<at::Tensor> others;  // those that need more than a copy of bytes
  const auto each = [&](auto&& plain) {
    int64_t offset = 0;
    for (const auto& tensor : tensors) {
      const auto size = static_cast<int64_t>(tensor.nbytes());
      if (is_plain_bytes(tensor)) {
        plain(tensor, static_cast<std::byte*>(message.mutable_data_ptr()) + offset, static_cast<size_t>(size));
      } else {
        places.push_back(place(others.size(), message, offset, tensor));
        others.push_back(tensor);
      }
      offset += padded_bytes(tensor);
    }
  };
  if (is_root) {
    each([](const at::Tensor& tensor, std::byte* place, size_t size) {
      std::memcpy(place, tensor.const_data_ptr(), size);
    });
    if (!others.empty()) at::_foreach_copy_(places, others);
    send(message, root);
    return;
  }
  send(message, root);
  each([](const at::Tensor& tensor, std::byte* place, size_t size) {
    std::memcpy(tensor.mutable_data_ptr(), place, size);
  });
  if (!others.empty()) at::_foreach_copy_(others, places);
}

void TensorBroadcast::send(const at::Tensor& bytes, int root) {
  if (work_ == nullptr) work_ = transport_->make_work();
  try {
    transport_->start(Collective::broadcast(bytes, root), *work_);
    work_->wait(timeout_);
  } catch (const TransportError&) {
    work_->abandon();
    throw;
  }
}

}  // namespace torchddp::transport
