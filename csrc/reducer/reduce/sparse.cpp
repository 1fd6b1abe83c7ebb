// Reduces a sparse gradient: as a whole, or only its values where ranks have agreed on row ids.
#include "reducer/reduce/reductions.h"

namespace torchddp::reducer {
namespace {

class SparseReduction final : public Reduction {
 public:
  explicit SparseReduction(const Context& context) : context_(context), work_(context.transport->make_work()) {}

  void start(bucket::Bucket& bucket) override {
    const auto tensor = bucket.row_ids() ? bucket.buffer()._values() : bucket.wire();
    context_.transport->start(transport::Collective::all_reduce(tensor), *work_);
  }
  bool poll() override { return work_->poll(); }
  void finish(bucket::Bucket& /*bucket*/) override { work_->wait(context_.config.timeout); }
  void abandon() noexcept override { work_->abandon(); }

 private:
  const Context& context_;
  const std::unique_ptr<transport::Work> work_;
};

}  // namespace

ReductionPtr make_sparse_reduction(const Context& context) { return std::make_unique<SparseReduction>(context); }

}  // namespace torchddp::reducer
