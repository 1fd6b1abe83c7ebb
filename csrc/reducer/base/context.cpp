#include "reducer/base/context.h"

#include <algorithm>

#include "common/check.h"
#include "transport/cuda/cuda_device.h"

namespace torchddp::reducer {
namespace {

std::shared_ptr<gpu::Device> device_of(const std::vector<at::Tensor>& params) {
  TDDP_CHECK(!params.empty(), "Expected at least one parameter.");
  const auto device = params.front().device();
  const bool on_one = std::all_of(params.begin(), params.end(), [&](const auto& p) { return p.device() == device; });
  return device.is_cuda() && on_one ? transport::cuda_device(device.index()) : nullptr;
}

void check_owners(const Context& context) {
  if (!context.owned) {
    return;
  }
  const auto size = context.transport->size();
  TDDP_CHECK(context.views && !context.config.wire_dtype,
             "buckets that belong to one rank are views, and travel as reduce_dtype says");
  for (const auto& spec : context.specs) {
    TDDP_CHECK(spec.owner >= 0 && spec.owner < size, "parameter '", spec.name, "' belongs to rank ", spec.owner,
               ", ranks are 0 to ", size - 1);
    TDDP_CHECK(!spec.sparse, "parameter '", spec.name,
               "' has sparse gradients: those can't be reduced to one rank. Make its embedding with sparse=False.");
  }
}

}  // namespace

Context::Context(std::vector<at::Tensor> params_, std::vector<plan::ParamSpec> specs_,
                 c10::intrusive_ptr<c10d::ProcessGroup> group_, std::shared_ptr<transport::Transport> transport_,
                 ReducerConfig config_)
    : params(std::move(params_)),
      specs(std::move(specs_)),
      config(std::move(config_)),
      owned(std::any_of(specs.begin(), specs.end(), [](const auto& spec) { return spec.owner >= 0; })),
      device(device_of(params)),
      group(std::move(group_)),
      transport(std::move(transport_)),
      views(config.gradient_as_bucket_view) {
  TDDP_CHECK(!config.wire_dtype || transport->capabilities().narrows,
             "wire_dtype needs shared memory (transport='shm'), but buckets go through ", transport->name());
  TDDP_CHECK(params.size() == specs.size(), "got ", params.size(), " parameters but ", specs.size(),
             " descriptions of them");
  check_owners(*this);
}

}  // namespace torchddp::reducer
