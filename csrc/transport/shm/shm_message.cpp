#include "transport/shm/shm_message.h"

#include <utility>

#include "common/check.h"
#include "transport/shm/shm_transport.h"

namespace torchddp::transport {

void ShmMessage::start(ShmTransport& transport) {
  const BelowAutograd guard;
  const auto bytes = bytes_of(tensor_);
  const bool plain = is_plain(tensor_);
  if (opType_ == c10d::OpType::SEND) {
    message_ = transport.mail().send(peer_, tag_, bytes, [&](std::byte* memory) {
      if (plain) {
        transport.copier().copy(memory, tensor_.const_data_ptr(), bytes);
      } else {
        pack(tensor_, memory);
      }
    });
    return;
  }
  memory_.output = plain ? tensor_ : private_bytes(bytes);
  if (!plain) {
    memory_.deliver_to({tensor_}, memory_.output);
  }
  message_ = transport.mail().receive(peer_, tag_, data_of(memory_.output), bytes);
}

bool ShmMessage::poll(ShmTransport& transport) { return transport.mail().poll(message_); }

void ShmMessage::await(ShmTransport& transport, Time since) { transport.mail().wait(message_, timeout_, since); }

bool ShmMessage::await_until(ShmTransport& transport, Time until, bool spin) {
  return transport.mail().wait_for(message_, until - shm::Engine::Clock::now(), spin);
}

void ShmMessage::deliver() {
  if (!message_->problem.empty()) {
    throw TransportError(c10::str("rank ", rank_, ": ", message_->problem));
  }
  if (memory_.deliver) {
    memory_.deliver();
  }
}

std::shared_ptr<void> ShmMessage::give_back(ShmTransport& transport, bool failed) {
  if (failed && message_ != nullptr) {
    transport.mail().forget(message_);
  }
  return std::make_shared<std::pair<at::Tensor, OperationMemory>>(std::move(tensor_), std::move(memory_));
}

int ShmMessage::sourceRank() const {
  TDDP_CHECK(isSuccess(), "the source of a message is unknown until it arrives");
  return message_->source;
}

}  // namespace torchddp::transport
