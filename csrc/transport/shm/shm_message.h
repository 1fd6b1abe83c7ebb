// A send or a receive of the backend.
#pragma once

#include "transport/shm/shm_work.h"

namespace torchddp::transport {

class ShmMessage final : public ShmC10dWork {
 public:
  // `peer`: -1 for a receive from any.
  ShmMessage(std::shared_ptr<ShmOperations> operations, int rank, Description description, at::Tensor tensor, int peer,
             int tag)
      : ShmC10dWork(std::move(operations), rank, std::move(description)),
        tensor_(std::move(tensor)),
        peer_(peer),
        tag_(tag) {}
  int sourceRank() const override;

 private:
  void start(ShmTransport& transport) override;
  bool poll(ShmTransport& transport) override;
  void await(ShmTransport& transport, Time since) override;
  bool await_until(ShmTransport& transport, Time until, bool spin) override;
  void deliver() override;
  std::shared_ptr<void> give_back(ShmTransport& transport, bool failed) override;

  at::Tensor tensor_;
  const int peer_, tag_;
  OperationMemory memory_;
  shm::MessagePtr message_;
};

}  // namespace torchddp::transport
