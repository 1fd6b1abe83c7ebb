#include "transport/c10d/group_work.h"

#include "common/errors.h"

namespace torchddp::transport {
namespace {

// Null for gloo's own reduce-scatter, which has no future; with more than one rank C10dTransport seldom uses it.
c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const c10::Error&) {
    return nullptr;
  }
}

}  // namespace

bool is_gloo(c10d::ProcessGroup& group) {
  try {
    return group.getBackend(c10::DeviceType::CPU)->getBackendName() == "gloo";
  } catch (const std::exception&) {
    return false;  // it has no backend for CPU tensors, or not one of torch's
  }
}

bool wait_interruptibly(c10d::Work& work, const GroupPtr& group, const Interruption& interruption,
                        std::chrono::milliseconds timeout) {
  if (work.isCompleted()) {
    interruption.check();
  } else if (const auto future = future_of(work); future != nullptr) {
    const bool ended = wait_or_keep(group, [&] { return interruption.wait_for(*future, timeout); });
    // If the time is up, torch reports it in its own words. Otherwise this is the short moment between the future and the work.
    timeout = ended ? kNoTimeout : std::chrono::milliseconds(1);
  }
  return work.wait(timeout);
}

void wait_or_throw(c10d::Work& work, const GroupPtr& group, const Interruption& interruption, bool interruptibly,
                   std::chrono::milliseconds timeout) {
  bool ok = false;
  try {
    ok = interruptibly ? wait_interruptibly(work, group, interruption, timeout) : work.wait(timeout);
  } catch (const SignalInterrupt&) {
    throw;
  } catch (const std::exception& error) {
    interruption.check();  // which may have been the cause
    throw TransportError(with_advice(reason_of(error)));
  }
  // c10d lets a Work report failure by its return value alone, as torchft's does.
  if (!ok) throw TransportError(with_advice("the process group reported that the operation failed."));
}

std::string reason_of(const std::exception& error) {
  const auto* const of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
}

std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group, at::Device device) {
  try {
    if (const auto options = group.getBackend(device.type())->getBackendOptions()) return options->timeout;
  } catch (const std::exception&) {  // a third-party backend that does not say
  }
  return kProcessGroupDefaultTimeout;
}

}  // namespace torchddp::transport
