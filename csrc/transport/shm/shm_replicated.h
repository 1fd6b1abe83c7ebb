// Replicated memory between the ranks of one host: see Note [Copies that are made when they are needed].
#pragma once

#include <memory>

#include "shm/replicas.h"
#include "transport/replicated.h"

namespace torchddp::transport {

class ShmReplicated final : public Replicated {
 public:
  // `charged`: whatever is held for as long as the memory is.
  ShmReplicated(std::shared_ptr<shm::Replicas> replicas, std::shared_ptr<void> charged)
      : replicas_(std::move(replicas)), charged_(std::move(charged)) {}

  at::Tensor seen(int owner, int64_t offset, int64_t numel, at::ScalarType dtype) const override;
  at::Tensor masters(int64_t offset, int64_t numel, at::ScalarType dtype) const override;
  void publish() override { replicas_->publish(); }
  void refresh() override { replicas_->refresh(); }

 private:
  at::Tensor part(std::byte* base, int64_t bytes, int64_t offset, int64_t numel, at::ScalarType dtype) const;

  std::shared_ptr<shm::Replicas> replicas_;
  std::shared_ptr<void> charged_;
};

}  // namespace torchddp::transport
