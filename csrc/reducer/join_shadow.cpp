#include "reducer/join_shadow.h"

#include <ATen/Functions.h>

#include <vector>

#include "reducer/pack/pack_rules.h"
#include "reducer/reduce/futures.h"
#include "reducer/reduce/reductions.h"

namespace torchddp::reducer {

void JoinShadow::take_part() {
  const WaitScope waits(events_.live(), "what ranks with inputs reduce");
  const bool records = static_graph_.all_record();
  const auto count = layout_.size();
  std::vector<std::unique_ptr<transport::Work>> works;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
  weights_.match();
  if (records) {
    used_.match();
    static_graph_.note_others_recorded();
  }
  for (int64_t index = 0; index < count; ++index) {
    const auto& bucket = layout_.bucket(index);
    const auto zeros = bucket.is_sparse() ? no_rows(context_.params[static_cast<size_t>(bucket.params().front())])
                                          : at::zeros_like(bucket.wire());
    if (hook_) {
      auto grad_bucket = make_grad_bucket(index, count, bucket, context_.params, zeros);
      futures.push_back(hook_.run(grad_bucket));
    } else {
      works.push_back(start(index, zeros));
    }
  }
  if (used_.are_searched()) {
    used_.match();
  }
  for (const auto& work : works) {
    work->wait(context_.config.timeout);
  }
  for (const auto& future : futures) {
    wait_for_future(context_, *future, "the communication hook's future");
    hook_.wait(*future);
  }
  used_.wait_for_reduction();
  weights_.finish_match();
}

std::unique_ptr<transport::Work> JoinShadow::start(int64_t index, const at::Tensor& buffer) const {
  std::vector<at::Tensor> in_place;
  for (const auto& gradient : layout_.bucket(index).in_place()) {
    in_place.push_back(at::zeros_like(gradient));
  }
  auto work = context_.transport->make_work();
  context_.transport->start(transport::Collective::all_reduce(buffer, all_reduce_options(context_, index), {in_place}),
                            *work);
  return work;
}

c10::intrusive_ptr<c10::ivalue::Future> JoinShadow::all_reduce(c10d::GradBucket& bucket) const {
  const auto& buffer = bucket.getBufferRef();
  const WaitScope waits(events_.live(), "a bucket that ranks with inputs reduce");
  start(static_cast<int64_t>(bucket.getIndex()), buffer)->wait(context_.config.timeout);
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
