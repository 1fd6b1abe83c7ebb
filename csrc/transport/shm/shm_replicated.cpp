#include "transport/shm/shm_replicated.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include "common/check.h"
#include "common/signals.h"
#include "shm/errors.h"
#include "transport/shm/shm_transport.h"

namespace torchddp::transport {

at::Tensor ShmReplicated::seen(int owner, int64_t offset, int64_t numel, at::ScalarType dtype) const {
  return part(replicas_->seen(owner), replicas_->bytes(owner), offset, numel, dtype);
}

at::Tensor ShmReplicated::masters(int64_t offset, int64_t numel, at::ScalarType dtype) const {
  return part(replicas_->masters(), replicas_->own_bytes(), offset, numel, dtype);
}

at::Tensor ShmReplicated::part(std::byte* base, int64_t bytes, int64_t offset, int64_t numel,
                               at::ScalarType dtype) const {
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  TDDP_INTERNAL(offset >= 0 && offset % size == 0 && numel >= 0 && numel <= (bytes - offset) / size,
                "outside of the replicated memory");
  return at::from_blob(
      base + offset, {numel}, [kept = replicas_, charged = charged_](void*) {}, at::TensorOptions().dtype(dtype));
}

std::shared_ptr<Replicated> ShmTransport::replicate(const std::vector<int64_t>& bytes, bool wanted,
                                                    std::chrono::milliseconds timeout) {
  if (spans_) {
    return nullptr;
  }
  TDDP_INTERNAL(static_cast<int>(bytes.size()) == size_, "a number of bytes for each rank is needed");
  const auto own_bytes = bytes[static_cast<size_t>(rank_)];
  std::shared_ptr<shm::Replicas> replicas;
  std::shared_ptr<void> charged;
  const auto attempt = [&](const auto& body) {
    try {
      body();
    } catch (const shm::Unavailable& problem) {
      wanted = false;
      TORCH_WARN_ONCE("rank ", rank_, ": each rank of this host keeps its own copy of the parameters, because ",
                      problem.what());
    }
    return !any_rank(*this, !wanted, timeout);
  };
  const bool made = attempt([&] {
    if (!wanted) {
      return;
    }
    if (!segment_->charge(own_bytes)) {
      throw shm::Unavailable("TORCHDDP_SHM_LIMIT_MB leaves no room for " + std::to_string(own_bytes) + " bytes");
    }
    charged = std::shared_ptr<void>(nullptr, [segment = segment_, own_bytes](void*) { segment->charge(-own_bytes); });
    replicas = std::make_shared<shm::Replicas>(own_bytes);
  });
  ++exchanges_;
  if (!made || !attempt([&] {
        replicas->exchange(peers_, rank_, bytes, exchanges_, timeout, [this] {
          interruption().check();
          check_signals();
        });
      })) {
    return nullptr;
  }
  return std::make_shared<ShmReplicated>(std::move(replicas), std::move(charged));
}

}  // namespace torchddp::transport
