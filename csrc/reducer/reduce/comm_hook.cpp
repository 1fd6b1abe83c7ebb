#include "reducer/reduce/comm_hook.h"

#include <algorithm>
#include <array>
#include <set>
#include <string_view>
#include <utility>

#include "common/errors.h"
#include "reducer/reduce/reductions.h"
#include "reducer/report/messages.h"
#include "transport/c10d/group_work.h"

namespace torchddp::reducer {
namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// torch's built-in hooks, reimplemented because libtorch does not export its classes.
class BuiltinHook final : public c10d::CppCommHookInterface<GroupPtr> {
 public:
  BuiltinHook(const GroupPtr& group, bool compresses) : CppCommHookInterface(group), compresses_(compresses) {}

  FuturePtr runHook(c10d::GradBucket& bucket) override {
    const auto buffer = bucket.getBuffer();
    std::vector<at::Tensor> sent{compresses_ ? buffer.to(at::kHalf) : buffer};
    // After the cast, as in torch, so that small gradients lose bits once instead of twice.
    sent[0].div_(state_->getSize());
    auto done = state_->allreduce(sent)->getFuture();
    if (!compresses_) return done;
    return done->then(
        [buffer](c10::ivalue::Future& future) {
          buffer.copy_(c10d::detail::parseCppCommHookResult(future.value()));
          return c10::IValue(buffer);
        },
        done->elementType());
  }

 private:
  const bool compresses_;
};

// torch's futures lose exception types, and gloo's errors about a lost peer have none, so this looks at the text.
bool tells_of_lost_peer(std::string_view text) {
  constexpr std::array<std::string_view, 4> kWords = {"TransportError", "DistBackendError", "gloo/transport/",
                                                      "Connection closed by peer"};
  return std::ranges::any_of(kWords, [&](auto word) { return text.find(word) != text.npos; });
}

// GradBucket holds shapes by reference, and a hook may keep it longer than any bucket lives.
c10::IntArrayRef shape_of_pairs(c10::IntArrayRef shape) {
  static std::mutex mutex;
  static std::set<std::vector<int64_t>> shapes;
  auto pairs = shape.vec();
  pairs.push_back(2);
  const std::lock_guard lock(mutex);
  return *shapes.insert(std::move(pairs)).first;
}

// Leaves a bucket to the communication hook.
class HookReduction final : public Reduction {
 public:
  HookReduction(const Context& context, const CommHook& hook, const StepEvents& events, int64_t index, int64_t count)
      : Reduction(Scaling::kBefore), context_(context), hook_(hook), events_(events), index_(index), count_(count) {}

  void begin(bucket::Bucket& bucket, double /*scale*/) override {
    const WaitScope waits(events_.live(), "the communication hook", index_);
    auto grad_bucket = make_grad_bucket(index_, count_, bucket, context_.params);
    future_ = hook_.run(grad_bucket);
  }

  bool poll() override { return future_ == nullptr || future_->completed(); }

  void finish(bucket::Bucket& bucket) override {
    const auto future = std::exchange(future_, nullptr);
    TDDP_CHECK(future != nullptr, "the communication hook returned no future for bucket ", index_, " on rank ",
               context_.rank(), ": it must return a torch.futures.Future that holds one tensor");
    wait_for_future(context_, *future, "the communication hook's future");
    const auto result = hook_.wait(*future);
    const auto& flat = bucket.wire();
    if (bucket.is_sparse()) {
      if (!result.is_same(flat)) flat.copy_(result);
      return;
    }
    TDDP_CHECK(result.numel() == flat.numel(), "the communication hook returned ", result.numel(),
               " elements for bucket ", index_, " on rank ", context_.rank(), ", which has ", flat.numel(),
               " (parameters ", list_names(bucket.params(), context_.specs), ")");
    if (!result.is_alias_of(flat)) flat.copy_(result.view_as(flat));
    bucket.clear_padding();
  }

  void abandon() noexcept override { future_.reset(); }
  bool hides_operation() const override { return true; }

 private:
  const Context& context_;
  const CommHook& hook_;
  const StepEvents& events_;
  const int64_t index_, count_;  // of all buckets
  FuturePtr future_;
};

// For a completed future: waits on the device, as a program's own wait does, and throws its error.
void throw_if_failed(c10::ivalue::Future& future) {
  future.wait();
  if (!future.hasError()) return;
  constexpr std::string_view kWrapped = "Got the following error when running the callback: ";
  auto text = future.tryRetrieveErrorMessage();
  text.resize(std::min(text.size(), text.find("\n\nAt:\n")));  // the stack of a callback in Python
  if (text.starts_with(kWrapped)) text.erase(0, kWrapped.size());
  if (tells_of_lost_peer(text)) throw TransportError(with_advice(text));
  std::rethrow_exception(future.exception_ptr());
}

}  // namespace

void CommHook::install_builtin(c10d::BuiltinCommHookType type, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  using enum c10d::BuiltinCommHookType;
  TDDP_CHECK(type == ALLREDUCE || type == FP16_COMPRESS, "unknown built-in communication hook ", static_cast<int>(type),
             ": ALLREDUCE and FP16_COMPRESS are allowed");
  install(std::make_unique<BuiltinHook>(group, type == FP16_COMPRESS));
}

at::Tensor CommHook::wait(c10::ivalue::Future& future) const {
  throw_if_failed(future);
  try {
    return hook_->parseHookResult(future.value());
  } catch (const std::exception& error) {
    throw std::runtime_error(c10::str("the communication hook's future must hold one tensor: ", error.what()));
  }
}

c10d::GradBucket make_grad_bucket(int64_t index, int64_t bucket_count, const bucket::Bucket& bucket,
                                  std::span<const at::Tensor> params, const std::optional<at::Tensor>& buffer) {
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> variables;
  for (int64_t i = 0; i < bucket.num_slots(); ++i) {
    const auto& param = params[bucket.params()[i]];
    variables.push_back(param);
    if (!bucket.is_sparse()) {
      const size_t reals = param.is_complex() ? 2 : 1;
      offsets.push_back(reals * static_cast<size_t>(bucket.offsets()[i]));
      lengths.push_back(reals * static_cast<size_t>(param.numel()));
      sizes.push_back(param.is_complex() ? shape_of_pairs(param.sizes()) : param.sizes());
    }
  }
  return c10d::GradBucket(static_cast<size_t>(index), static_cast<size_t>(bucket_count), buffer.value_or(bucket.wire()),
                          std::move(offsets), std::move(lengths), std::move(sizes), std::move(variables),
                          buffer ? std::nullopt : bucket.row_ids());
}

ReductionPtr make_hook_reduction(const Context& context, const CommHook& hook, const StepEvents& events, int64_t index,
                                 int64_t count) {
  return std::make_unique<HookReduction>(context, hook, events, index, count);
}

void wait_for_future(const Context& context, c10::ivalue::Future& future, const char* what) {
  const auto& interruption = context.transport->interruption();
  if (future.completed()) return interruption.check();
  const bool own_limit = context.config.timeout != transport::kTransportTimeout;
  const auto limit = own_limit ? context.config.timeout : transport::timeout_of(*context.group, context.param_device());
  if (!transport::wait_or_keep(context.group, [&] { return interruption.wait_for(future, limit); })) {
    throw TransportError(with_advice(c10::str(what, " was not completed within ", limit.count(), " ms, the timeout of ",
                                              own_limit ? "this DistributedDataParallel." : "the process group.")));
  }
}

void QueuedFutures::wait() {
  const auto futures = take();
  for (size_t i = 0; i < futures.size(); ++i) {
    const WaitScope waits(events_.live(), "what was queued after backward");
    described_in_step(context_, events_,
                      c10::str("what was queued after backward (", i + 1, " of ", futures.size(), ")"), [&] {
                        wait_for_future(context_, *futures[i], "its future");
                        throw_if_failed(*futures[i]);
                      });
  }
}

}  // namespace torchddp::reducer
