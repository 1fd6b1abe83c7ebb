#include "reducer/plan_keeper.h"

#include <ATen/Functions.h>

#include <utility>

#include "common/check.h"
#include "reducer/parts.h"
#include "reducer/report/messages.h"

namespace torchddp::reducer {
namespace {

// Collective: returns rank 0's plan, since all ranks must reduce the same buckets in the same order. It is exchanged through
// the parameters' device, because a NCCL group takes no CPU tensors.
plan::BucketPlan agree_on_plan(const plan::BucketPlan& mine, const Context& context) {
  if (context.transport->size() == 1) return mine;
  const auto words = plan::encode_plan(mine);
  auto wire = at::tensor(words, at::kLong).to(context.param_device());
  const auto work = context.transport->make_work();
  context.transport->start(transport::Collective::broadcast(wire, 0), *work);
  work->wait(context.config.timeout);
  const auto host = wire.cpu();
  context.transport->check();  // after a failure, what the device has read is garbage
  const std::span<const int64_t> agreed(host.const_data_ptr<int64_t>(), words.size());
  return plan::decode_plan(agreed, context.specs);
}

}  // namespace

void PlanKeeper::lay_out_first() {
  const auto order = plan::reverse_registration_order(parts_.context.num_params());
  parts_.layout.lay_out(plan::make_bucket_plan(parts_.context.specs, order, parts_.context.config));
  agree_on_memory();
}

bool PlanKeeper::rebuild() {
  note_capture();
  if (!should_rebuild() || measured_order_.empty()) return false;
  // If this fails there is no second attempt: the next order would be that of another step.
  const auto order = std::exchange(measured_order_, {});
  switch_to(plan::make_bucket_plan(parts_.context.specs, order, parts_.context.config));
  return true;  // true even if the order produces the same buckets
}

bool PlanKeeper::adopt(const std::optional<plan::BucketPlan>& wanted) {
  note_capture();
  TDDP_CHECK(!in_graph_, "buckets on rank ", parts_.context.rank(),
             " can't change: a captured CUDA graph holds their addresses. Plan before the capture.");
  if (wanted) plan::check_plan(*wanted, parts_.context.specs);
  const bool differs = switch_to(wanted.value_or(parts_.layout.plan()));
  if (!differs) agree_on_memory();  // in case a rank that joined with other buckets did
  return differs;
}

bool PlanKeeper::switch_to(const plan::BucketPlan& mine) {
  const WaitScope waits(parts_.events.live(), "the other ranks, to agree on new buckets");
  auto agreed = described(
      [&] {
        return c10::str("rank ", parts_.context.rank(), ": agreeing on new buckets before step ", parts_.events.steps(),
                        " failed.");
      },
      [&] { return agree_on_plan(mine, parts_.context); }, &parts_.events.live());
  const bool differs = agreed != parts_.layout.plan();
  has_rebuilt_ = true;
  measured_order_.clear();
  if (differs) {
    parts_.layout.lay_out(std::move(agreed));
    agree_on_memory();
  }
  return differs;
}

void PlanKeeper::use(std::shared_ptr<transport::Transport> transport) {
  change_transport(std::move(transport));
  agree_on_memory();
}

void PlanKeeper::agree_on_memory() {
  auto agreed = transport::agree_on_memory(parts_.context.transport, parts_.context.config.timeout);
  if (agreed != parts_.context.transport) change_transport(std::move(agreed));
}

void PlanKeeper::change_transport(std::shared_ptr<transport::Transport> transport) {
  // Work objects of the old transport, held by reductions, must not outlive it.
  const auto old = parts_.context.exchange_transport(std::move(transport));
  parts_.used.rebind();
  parts_.layout.lay_out_again();
}

void PlanKeeper::measure(const Step& step) {
  if (has_rebuilt_ || !measured_order_.empty()) return;
  if (auto order = step.ready_order(); !order.empty()) {
    measured_order_ = plan::complete_order(std::move(order), parts_.context.num_params());
  }
}

void PlanKeeper::take_reverse_order() {
  if (should_rebuild() && measured_order_.empty()) {
    measured_order_ = plan::reverse_registration_order(parts_.context.num_params());
  }
}

void PlanKeeper::note_capture() { in_graph_ = in_graph_ || parts_.context.is_captured(); }

}  // namespace torchddp::reducer
