// Buckets of devices: packed in one launch when they are complete, on the stream of the last gradient.
#include <ATen/Functions.h>

#include "reducer/reducer_inl.h"

namespace torchddp::reducer {

bool Reducer::packs_whole_buckets() const { return config_.pack_whole_buckets || !params_.front().device().is_cpu(); }

// Called by the hook of a gradient: torch's current stream is the one that produced it.
void Reducer::note_stream(bucket::Bucket& bucket) {
  if (device_ != nullptr) {
    auto* const stream = device_->current_stream();
    const std::lock_guard lock(streams_mutex_);
    bucket.streams.add(stream);
  }
}

// Under launch_mutex_. See Note [Streams and lifetimes] in gpu/stream_set.h.
void Reducer::pack_whole_bucket(bucket::Bucket& bucket, int64_t last, const at::Tensor* incoming) {
  const c10::NoGradGuard no_grad;
  auto* const stream = device_ != nullptr ? device_->current_stream() : nullptr;
  if (device_ != nullptr) {
    bucket.packed_on = stream;
    bucket.streams.join_into(*device_, stream, fork_);
  }
  lend_memory(bucket);
  bucket::Gather gather(scale_);  // holds the gradients until they are packed
  const bool captured = is_captured();
  if (!captured) {  // a replay would copy again, to whoever held gradients then
    leave_to_holders(bucket);
  }
  std::vector<int64_t> looked_at;
  std::vector<at::Tensor> own;
  for (int64_t i = 0; i < bucket.num_slots(); ++i) {
    const auto param = bucket.params()[static_cast<size_t>(i)];
    const bool unused = marked_[static_cast<size_t>(param)].load(std::memory_order_relaxed) == kMarkedUnused;
    auto& slot = bucket.slot(i);
    with_grad(param, [&](at::Tensor& grad) {
      if (!grad.defined()) {
        slot.zero();
        if (gives_away(bucket)) {
          return;
        }
        add_late(param);
        return;
      }
      if (non_finite_ != nullptr) {
        looked_at.push_back(param);
        own.push_back(grad.detach());
      }
      if (slot.holds(grad)) {
        if (unused) {
          add_late(param, slot.clone());
        }
        if (scale_ != 1.0) {
          gather.add_in_place(slot);
        }
        return;
      }
      check_grad(param, grad);
      slot.restore_view();
      gather.add(slot, grad.detach());
      if (gives_away(bucket)) {
        grad.reset();
        return;
      }
      if (!views_) {
        return;  // finish_bucket copies the average back
      }
      if (becomes_view(grad, unused, param == last ? incoming : nullptr)) {
        grad = slot.view();
        return;
      }
      if (grad.requires_grad()) {
        warn_create_graph();
      }
      add_late(param);
    });
  }
  if (!own.empty() && !captured) {
    non_finite_->look(stats_.steps, looked_at, own);
  }
  gather.run();
  if (device_ != nullptr) {
    bucket.streams.wait_back(*device_, stream, fork_);
  }
}

// The hook that launches a bucket may be that of an earlier one, on another stream than the one that packed it.
void Reducer::follow_packing(const bucket::Bucket& bucket) {
  if (device_ == nullptr || bucket.is_sparse()) {
    return;
  }
  auto* const current = device_->current_stream();
  if (current != bucket.packed_on) {
    device_->record(fork_, bucket.packed_on);
    device_->wait(current, fork_);
  }
}

// Whether this step becomes part of a CUDA graph.
bool Reducer::is_captured() { return device_ != nullptr && device_->capturing(device_->current_stream()); }

}  // namespace torchddp::reducer
