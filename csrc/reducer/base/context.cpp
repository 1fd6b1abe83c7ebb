#include "reducer/base/context.h"

#include <algorithm>
#include <unordered_map>

#include "common/check.h"
#include "transport/cuda/cuda_device.h"

namespace torchddp::reducer {
namespace {

std::vector<std::shared_ptr<gpu::Device>> devices_of(const std::vector<at::Tensor>& params) {
  TDDP_CHECK(!params.empty(), "Expected at least one parameter.");
  std::vector<std::shared_ptr<gpu::Device>> devices;
  for (const auto& param : params) {
    auto device = transport::device_of(param.device());
    if (device != nullptr && std::ranges::find(devices, device) == devices.end()) {
      devices.push_back(std::move(device));
    }
  }
  return devices;
}

void check_owners(const Context& context) {
  if (!context.owned) return;
  const auto size = context.transport->size();
  TDDP_CHECK(context.config.grad_precision == GradPrecision::kOfParameter,
             "buckets that belong to one rank keep gradients in the parameters' dtype");
  TDDP_CHECK(context.views && !context.config.wire_dtype,
             "buckets that belong to one rank are views, and are sent in reduce_dtype");
  for (const auto& spec : context.specs) {
    TDDP_CHECK(spec.owner >= 0 && spec.owner < size, "parameter '", spec.name, "' belongs to rank ", spec.owner,
               ", ranks are 0 to ", size - 1);
    TDDP_CHECK(!spec.sparse, "parameter '", spec.name,
               "' has sparse gradients, which can't be reduced to one rank. Create its embedding with sparse=False.");
  }
}

}  // namespace

Context::Context(std::vector<at::Tensor> params_, std::vector<plan::ParamSpec> specs_,
                 c10::intrusive_ptr<c10d::ProcessGroup> group_, std::shared_ptr<transport::Transport> transport_,
                 ReducerConfig config_)
    : params(std::move(params_)), specs(std::move(specs_)), config(std::move(config_)),
      owned(std::ranges::any_of(specs, [](const auto& spec) { return spec.owner >= 0; })), devices(devices_of(params)),
      main_grads(config.grad_precision == GradPrecision::kMainGrads ? std::make_unique<MainGrads>(params.size())
                                                                    : nullptr),
      group(std::move(group_)), transport(std::move(transport_)), views(config.gradient_as_bucket_view) {
  TDDP_CHECK(!config.wire_dtype || transport->capabilities().narrows,
             "Precision(wire=) needs shared memory (transport='shm'), but buckets go through ", transport->name(),
             ": pass comm_hook=\"bf16\" or \"fp16\" instead");
  TDDP_CHECK(params.size() == specs.size(), "got ", params.size(), " parameters but ", specs.size(),
             " descriptions of them");
  check_owners(*this);
  TDDP_CHECK(main_grads == nullptr || (views && !has_own_storage()), "main gradients are views of the buckets' memory");
}

bucket::GradStorage Context::grad_storage(int64_t param) const {
  const auto own = params[param].scalar_type();
  const auto precision = config.grad_precision;
  const bool widens = precision != GradPrecision::kOfParameter && (own == at::kBFloat16 || own == at::kHalf);
  const auto dtype = widens ? at::kFloat : own;
  return {.dtype = dtype,
          .grad_dtype = precision == GradPrecision::kGrads ? dtype : own,
          .view_storage = config.view_storage,
          .views = !(widens && precision == GradPrecision::kReduced),
          .may_adopt = !(widens && precision == GradPrecision::kReduced) && main_grads == nullptr};
}

std::vector<int64_t> Context::places_in(const Context& other) const {
  std::unordered_map<const at::TensorImpl*, int64_t> theirs;
  for (const auto& param : other.params) theirs.emplace(param.unsafeGetTensorImpl(), std::ssize(theirs));
  std::vector<int64_t> places;
  for (const auto& param : params) {
    const auto found = theirs.find(param.unsafeGetTensorImpl());
    places.push_back(found == theirs.end() ? kNotThere : found->second);
  }
  return places;
}

std::shared_ptr<gpu::Device> Context::device_of(int64_t param) const {
  return transport::device_of(params[param].device());
}

}  // namespace torchddp::reducer
