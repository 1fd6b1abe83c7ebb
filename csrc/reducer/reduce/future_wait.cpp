#include "reducer/reduce/future_wait.h"

#include "common/check.h"
#include "transport/c10d/group_work.h"

namespace torchddp::reducer {

void wait_for_future(const Context& context, c10::ivalue::Future& future, const char* what) {
  const auto& interruption = context.transport->interruption();
  if (future.completed()) {
    interruption.check();
    return;
  }
  const bool own_limit = context.config.timeout != transport::kTransportTimeout;
  const auto limit = own_limit ? context.config.timeout : transport::timeout_of(*context.group, context.param_device());
  if (!transport::wait_or_keep(context.group, [&] { return interruption.wait_for(future, limit); })) {
    throw TransportError(c10::str(what, " was not completed within ", limit.count(), " ms, the timeout of ",
                                  own_limit ? "this DistributedDataParallel" : "the process group"));
  }
}

}  // namespace torchddp::reducer
