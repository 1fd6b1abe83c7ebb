#include "reducer/plan_agreement.h"

#include <ATen/Functions.h>

namespace torchddp::reducer {

plan::BucketPlan agree_on_plan(const plan::BucketPlan& mine, std::span<const plan::ParamSpec> params,
                               const plan::BucketLimits& limits, transport::Transport& transport, at::Device device,
                               std::chrono::milliseconds timeout) {
  if (transport.size() == 1) {
    return mine;
  }
  const auto num_params = static_cast<int64_t>(params.size());
  auto words = plan::encode_plan(mine, num_params);
  auto host = at::tensor(words, at::kLong);
  auto wire = host.to(device);
  auto work = transport.make_work();
  transport.broadcast(wire, 0, *work);
  work->wait(timeout);
  host = wire.cpu();
  const std::span<const int64_t> agreed(host.const_data_ptr<int64_t>(), words.size());
  return plan::decode_plan(agreed, params, limits.alignment_bytes);
}

}  // namespace torchddp::reducer
