#include "reducer/pack/hand_back.h"

#include <c10/core/GradMode.h>

namespace torchddp::reducer {

// How much of the memory for other ranks' gradients is kept between steps: packed ones, and those with a bucket each. A rank that
// runs ahead takes more: it must not wait for its peers in the middle of backward, where they may be waiting for it in a
// collective of the user's own.
constexpr size_t kKeptBlocks = 8;
constexpr int64_t kKeptBytes = 8 << 20;

OwnAverages::OwnAverages(const Context& context, const Step& step, const BucketLayout& layout, UsedParams& used,
                         GradMarks& marks)
    : context_(context), step_(step), layout_(layout), used_(used), marks_(marks), reduced_(context.params.size(), 0),
      kept_(context.owned ? context.params.size() : 0) {}

void OwnAverages::put_aside(int64_t param) {
  if (reduced_[param] == 0) return;
  reduced_[param] = 0;
  context_.with_grad(param, [&](at::Tensor& grad) {
    if (!marks_.has(param, grad) || grad.count_nonzero().item<int64_t>() == 0) return;
    const c10::NoGradGuard no_grad;
    if (!step_.armed()) {
      reduced_[param] = 1;
      throw std::runtime_error(c10::str(
          "parameter '", context_.spec(param).name, "' on rank ", context_.rank(),
          ": its gradient was already reduced, and this backward, which isn't, would add to it only on its owner. Call "
          "zero_grad() before no_sync() or a second backward; a forward without a backward needs torch.no_grad()."));
    }
    kept_[param] = layout_.place(param).slot->holds(grad) ? grad.clone() : grad;
    grad.reset();
  });
}

void OwnAverages::finish() {
  if (!context_.owned) return;
  context_.transport->scratch().trim(kKeptBlocks);
  context_.transport->trim_gradients(kKeptBytes);
  for (int64_t param = 0; param < context_.num_params(); ++param) {
    if (layout_.place(param).bucket->is_given_away() ||
        (!kept_[param].defined() && used_.is_unused_everywhere(param))) {
      continue;
    }
    context_.with_grad(param, [&](at::Tensor& grad) {
      if (kept_[param].defined()) {
        if (grad.defined()) {
          grad.add_(kept_[param]);
        } else {
          grad = kept_[param];
        }
        kept_[param].reset();
      }
      reduced_[param] = grad.defined() ? 1 : 0;
      if (grad.defined()) marks_.note(param, grad);
    });
  }
}

void HandBack::run(bucket::Bucket& bucket) {
  if (bucket.is_given_away()) {
    bucket.release_memory();
    return;
  }
  if (bucket.is_sparse() || packed_.are_left_to_optimizer()) return;
  auto pieces = pieces_to_move();
  for (const auto param : bucket.params()) {
    context_.with_grad(param, [&](at::Tensor& grad) {
      packed_.compare(param, grad);
      hand_back(param, grad, pieces);
    });
  }
  pieces.run();
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
    grad = slot.clone();
  } else {
    pieces.add(slot, grad);  // if the gradient is part of a graph (create_graph), only its values change
  }
}

void HandBack::finish(const LateGrad& late) {
  const auto& place = layout_.place(late.param);
  const bool sparse = place.slot == nullptr;
  const bool skipped = place.bucket->state() == bucket::BucketState::kSkipped;
  if (packed_.are_left_to_optimizer() && !skipped) return;
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
