#include "reducer/join_shadow.h"

#include <ATen/Functions.h>

#include "reducer/pack/sparse_grad.h"
#include "reducer/reduce/reductions.h"

namespace torchddp::reducer {

std::vector<c10d::GradBucket> JoinShadow::zero_buckets() const {
  std::vector<c10d::GradBucket> result;
  for (int64_t i = 0; i < layout_.size(); ++i) {
    const auto& bucket = layout_.bucket(i);
    const auto zeros = bucket.is_sparse() ? no_rows(context_.params[static_cast<size_t>(bucket.params().front())])
                                          : at::zeros_like(bucket.wire());
    result.push_back(make_grad_bucket(i, layout_.size(), bucket, context_.params, zeros));
  }
  return result;
}

c10::intrusive_ptr<c10::ivalue::Future> JoinShadow::reduce(c10d::GradBucket& bucket) const {
  return hook_ ? hook_.run(bucket) : all_reduce(bucket);
}

c10::intrusive_ptr<c10::ivalue::Future> JoinShadow::all_reduce(c10d::GradBucket& bucket) const {
  const auto& buffer = bucket.getBufferRef();
  auto work = context_.transport->make_work();
  const WaitScope waits(events_.live(), "a bucket that ranks with inputs reduce");
  const auto index = static_cast<int64_t>(bucket.getIndex());
  std::vector<at::Tensor> others;
  for (const auto& gradient : layout_.bucket(index).apart()) {
    others.push_back(at::zeros_like(gradient));
  }
  context_.transport->start(transport::Collective::all_reduce(buffer, all_reduce_options(context_, index), {others}),
                            *work);
  work->wait(context_.config.timeout);
  // With the device, so that a wait on another stream also waits for this one.
  std::vector<c10::Device> devices;
  if (!buffer.device().is_cpu()) {
    devices.push_back(buffer.device());
  }
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::move(devices));
  future->markCompleted(c10::IValue(std::vector<at::Tensor>{buffer}));
  return future;
}

}  // namespace torchddp::reducer
