#include "transport/factory.h"

#include "transport/c10d/c10d_transport.h"

namespace torchddp::transport {

std::shared_ptr<Transport> open_transport(const std::string& choice, c10::intrusive_ptr<c10d::ProcessGroup> group) {
  if (choice == "auto" || choice == "c10d") {
    return std::make_shared<C10dTransport>(std::move(group));
  }
  throw std::invalid_argument("transport must be 'auto' or 'c10d', got '" + choice + "'");
}

}  // namespace torchddp::transport
