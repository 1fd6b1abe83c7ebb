// Many tensors in one message: a module's buffers before forward, its weights when it is wrapped.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "transport/transport.h"

namespace torchddp::transport {

// Holds one copy of the small tensors, as bytes; larger ones are sent from where they are.
class TensorBroadcast {
 public:
  // `message_bytes`: no message is larger, but for a tensor that is.
  TensorBroadcast(std::shared_ptr<Transport> transport, int64_t message_bytes, std::chrono::milliseconds timeout)
      : transport_(std::move(transport)), message_bytes_(message_bytes), timeout_(timeout) {}

  // Collective. On return all ranks' `tensors` hold those of rank `root`. They must be strided and of one device, and agree in
  // number, dtypes and shapes between ranks. Invisible to autograd: no version counter moves.
  void run(std::span<const at::Tensor> tensors, int root);

 private:
  void run_flat(std::span<const at::Tensor> tensors, int64_t bytes, int root);
  void run_alone(const at::Tensor& tensor, int root);
  void send(const at::Tensor& bytes, int root);

  std::shared_ptr<Transport> transport_;
  int64_t message_bytes_;
  std::chrono::milliseconds timeout_;
  std::unique_ptr<Work> work_;
  at::Tensor flat_;
};

}  // namespace torchddp::transport
