// Under join(): a rank that has run out of inputs takes part in the reductions of the others.
#include <ATen/Functions.h>

#include "reducer/reducer.h"

namespace torchddp::reducer {
namespace {

std::unique_ptr<transport::Work> start_all_reduce(const Parts& parts, int64_t index, const at::Tensor& buffer) {
  std::vector<at::Tensor> in_place;
  for (const auto& gradient : parts.layout.bucket(index).in_place()) in_place.push_back(at::zeros_like(gradient));
  auto work = parts.context.transport->make_work();
  const auto operation =
      transport::Collective::all_reduce(buffer, all_reduce_options(parts.context, index), {in_place});
  parts.context.transport->start(operation, *work);
  return work;
}

}  // namespace

// With zeros. Like the others this rank waits only once everything has started: what it waited for before might need a rank
// that waits for something later. Throws what the step throws on all ranks.
void Reducer::take_part() {
  auto& parts = parts_;
  const auto& context = parts.context;
  const WaitScope waits(parts.events.live(), "what ranks with inputs reduce");
  const auto count = parts.layout.size();
  std::vector<std::unique_ptr<transport::Work>> works;
  std::vector<FuturePtr> futures;
  parts.weights.match();
  for (int64_t index = 0; index < count; ++index) {
    const auto& bucket = parts.layout.bucket(index);
    const auto zeros =
        bucket.is_sparse() ? no_rows(context.params[bucket.params().front()]) : at::zeros_like(bucket.wire());
    if (parts.hook) {
      auto grad_bucket = make_grad_bucket(index, count, bucket, context.params, zeros);
      futures.push_back(parts.hook.run(grad_bucket));
    } else {
      works.push_back(start_all_reduce(parts, index, zeros));
    }
  }
  if (parts.used.are_exchanged()) parts.used.match();
  if (parts.static_graph.recording()) parts.static_graph.note_others_recorded();
  for (const auto& work : works) work->wait(context.config.timeout);
  for (const auto& future : futures) {
    wait_for_future(context, *future, "the communication hook's future");
    parts.hook.wait(*future);
  }
  parts.used.wait_for_reduction();
  parts.weights.finish_match();
}

FuturePtr Reducer::all_reduce_as_others(c10d::GradBucket& bucket) const {
  const auto& buffer = bucket.getBufferRef();
  const WaitScope waits(parts_.events.live(), "a bucket that ranks with inputs reduce");
  start_all_reduce(parts_, static_cast<int64_t>(bucket.getIndex()), buffer)->wait(parts_.context.config.timeout);
  // With the device, so that a wait on another stream also waits for this one.
  std::vector<c10::Device> devices;
  if (!buffer.device().is_cpu()) devices.push_back(buffer.device());
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::move(devices));
  future->markCompleted(c10::IValue(std::vector<at::Tensor>{buffer}));
  return future;
}

}  // namespace torchddp::reducer
