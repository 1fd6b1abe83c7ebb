// Sends many tensors in one message: a module's buffers before forward, its weights when it is wrapped.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "transport/transport.h"

namespace torchddp::transport {

// Holds one message. If the transport reaches any memory, larger tensors are sent from where they are; otherwise in pieces.
class TensorBroadcast {
 public:
  // `message_bytes`: the largest message, except for tensors sent from where they are.
  TensorBroadcast(std::shared_ptr<Transport> transport, int64_t message_bytes, std::chrono::milliseconds timeout);

  // Not collective: allocates what run() needs for such tensors, so that ranks can agree on a transport by whether this
  // succeeded.
  void reserve(const std::vector<at::Tensor>& tensors);
  // Collective. On return `tensors` hold rank `root`'s values on all ranks. They must be strided, on one device, and agree in
  // number, dtypes and shapes between ranks. Invisible to autograd: no version counter changes.
  void run(const std::vector<at::Tensor>& tensors, int root);

 private:
  enum class Sending { kTogether, kAlone, kInPieces };
  Sending sending(const at::Tensor& tensor) const;
  void run_together(std::span<const at::Tensor> tensors, int64_t bytes, int root);
  // Where the message has `tensor`, the index-th that is copied by operators: the view of the last run, if it fits.
  at::Tensor& place(size_t index, const at::Tensor& message, int64_t offset, const at::Tensor& tensor);
  void run_alone(const at::Tensor& tensor, int root);
  void run_in_pieces(const at::Tensor& tensor, int root);
  void make_room(int64_t bytes, at::Device device);
  void send(const at::Tensor& bytes, int root);

  std::shared_ptr<Transport> transport_;
  int64_t message_bytes_;
  std::chrono::milliseconds timeout_;
  std::unique_ptr<Work> work_;
  at::Tensor flat_;
  std::vector<at::Tensor> places_;  // views of flat_
};

}  // namespace torchddp::transport
