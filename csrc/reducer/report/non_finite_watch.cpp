#include "reducer/report/non_finite_watch.h"

#include <algorithm>
#include <utility>

#include "bucket/tensor_checks.h"
#include "common/errors.h"
#include "reducer/report/messages.h"

namespace torchddp::reducer {

NonFiniteWatch::NonFiniteWatch(const Context& context, const StepEvents& events)
    : context_(context),
      events_(events),
      log_(context.config.find_non_finite || context.config.raise_non_finite
               ? std::make_unique<NonFiniteLog>(context.num_params())
               : nullptr) {}

void NonFiniteWatch::look_at(int64_t param, const at::Tensor& grad) {
  if (on()) {
    note(param, bucket::count_non_finite(grad));
  }
}

void NonFiniteWatch::look_at(const std::vector<int64_t>& params, const std::vector<at::Tensor>& grads) {
  if (!grads.empty()) {
    log_->look(events_.steps(), params, grads);
  }
}

void NonFiniteWatch::look_at_average(const bucket::Bucket& bucket, bool known_finite) {
  if (!context_.config.raise_non_finite || known_finite) [[likely]] {
    return;
  }
  const auto& average = bucket.is_sparse() ? bucket.buffer()._values() : bucket.wire();
  const auto is_bad = [](const at::Tensor& values) { return bucket::count_non_finite(values) > 0; };
  if (!is_bad(average) && std::none_of(bucket.apart().begin(), bucket.apart().end(), is_bad)) [[likely]] {
    return;
  }
  for (int64_t i = 0; i < bucket.num_slots(); ++i) {
    if (bucket.is_sparse() || is_bad(bucket.values(i))) {
      bad_averages_.push_back(bucket.params()[static_cast<size_t>(i)]);
    }
  }
}

void NonFiniteWatch::publish() {
  if (on()) {
    log_->publish();
  }
}

void NonFiniteWatch::raise_if_bad() {
  if (bad_averages_.empty()) {
    return;
  }
  const auto bad = std::exchange(bad_averages_, {});
  std::vector<int64_t> own;
  for (const auto& found : log_->episode()) {
    if (found.step == events_.steps()) {
      own.push_back(found.param);
    }
  }
  throw NonFiniteError(non_finite_message(context_.rank(), events_.steps(), bad, own, context_.specs));
}

}  // namespace torchddp::reducer
