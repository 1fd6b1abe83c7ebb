#include "reducer/pack/hand_back.h"

namespace torchddp::reducer {

void HandBack::run(bucket::Bucket& bucket) {
  if (bucket.is_given_away()) {
    bucket.release_memory();
    return;
  }
  if (bucket.is_sparse() || packed_.are_left_to_optimizer()) {
    return;
  }
  auto pieces = pieces_to_move();
  for (const auto param : bucket.params()) {
    context_.with_grad(param, [&](at::Tensor& grad) {
      packed_.compare(param, grad);
      hand_back(param, grad, pieces);
    });
  }
  pieces.run();
}

bucket::DevicePieces HandBack::pieces_to_move() const {
  return bucket::DevicePieces(bucket::DevicePieces::Direction::kUnpack, 1.0, context_.packs_whole_buckets());
}

void HandBack::hand_back(int64_t param, at::Tensor& grad, bucket::DevicePieces& pieces) {
  const auto& place = layout_.place(param);
  auto& slot = *place.slot;
  if (used_.is_unused_everywhere(param) || (grad.defined() && slot.holds(grad))) {
    return;  // a gradient that no rank used stays as it is
  }
  if (layout_.becomes_view(*place.bucket, grad)) {
    slot.restore_view();
    grad = slot.view();
  } else if (!grad.defined()) {
    grad = slot.clone_as(slot.grad_dtype());
  } else {
    pieces.add(slot, grad);  // if the gradient is part of a graph (create_graph), only its values change
  }
}

void HandBack::finish(const LateGrad& late) {
  const auto& place = layout_.place(late.param);
  const bool sparse = place.slot == nullptr;
  const bool skipped = place.bucket->state() == bucket::BucketState::kSkipped;
  if (packed_.are_left_to_optimizer() && !skipped) {
    return;
  }
  context_.with_grad(late.param, [&](at::Tensor& grad) {
    if (!skipped && !used_.is_unused_everywhere(late.param)) {
      if (!sparse && !place.bucket->is_given_away()) {
        auto pieces = pieces_to_move();
        hand_back(late.param, grad, pieces);
        pieces.run();
      } else if (context_.shares_gradients) {
        const auto& average = place.bucket->buffer();
        if (grad.defined()) {
          grad.copy_(average);
        } else {
          grad = average;
        }
      }
    } else if ((sparse && !context_.shares_gradients) || !grad.defined()) {
      grad = late.saved;
    } else if (late.saved.defined()) {
      grad.copy_(late.saved);
    }
  });
}

}  // namespace torchddp::reducer
