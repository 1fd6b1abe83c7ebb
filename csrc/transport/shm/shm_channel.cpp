#include "transport/shm/shm_channel.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <utility>

#include "common/check.h"
#include "transport/c10d/group_work.h"
#include "transport/shm/shm_transport.h"
#include "transport/sum_types.h"

namespace torchddp::transport {
namespace {

// The link between hosts, through a process group of the ranks that own the same shard on each host. It may still write to the
// segment after an operation has failed and the transport is gone.
class C10dOuterLink final : public shm::OuterLink {
 public:
  C10dOuterLink(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<shm::Segment> segment)
      : group_(std::move(group)), segment_(std::move(segment)) {}

  void start(void* data, kernels::DType type, int64_t numel, std::optional<kernels::DType> sent) override {
    const c10::NoGradGuard no_grad;
    const WithoutPythonObjects without_python_objects;
    Transfer running;
    running.data =
        at::from_blob(data, {numel}, [segment = segment_](void*) {}, at::TensorOptions().dtype(scalar_type(type)));
    try {
      if (sent) {
        // Process groups sum 16-bit floats in 16 bits. Here each host gets the others' addends and sums them in fp32.
        auto mine = running.data.to(scalar_type(*sent));
        running.gathered = at::empty({group_->getSize() * numel}, mine.options());
        running.work = all_gather_flat(*group_, running.gathered, mine);
      } else {
        std::vector<at::Tensor> tensors{running.data};
        running.work = group_->allreduce(tensors, c10d::AllreduceOptions());
      }
    } catch (const std::exception& error) {
      throw TransportError(with_advice(reason_of(error)));
    }
    running_.push_back(std::move(running));
  }

  bool finish_oldest() override {
    auto& oldest = running_.front();
    if (!oldest.work->isCompleted()) return false;
    wait_or_throw(*oldest.work, group_, Interruption(), /*interruptibly=*/false);
    if (oldest.gathered.defined()) {
      const c10::NoGradGuard no_grad;
      at::sum_out(oldest.data, oldest.gathered.view({group_->getSize(), -1}), at::IntArrayRef{0}, /*keepdim=*/false,
                  oldest.data.scalar_type());
    }
    running_.pop_front();
    return true;
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<shm::Segment> segment_;
  struct Transfer {
    c10::intrusive_ptr<c10d::Work> work;
    at::Tensor data;
    at::Tensor gathered;  // what all hosts sent, one row each, unless the process group sums it
  };
  std::deque<Transfer> running_;
};

}  // namespace

ShmEndpoint::ShmEndpoint(int64_t limit_bytes, std::shared_ptr<ShmMeeting> meeting)
    : limit_bytes_(limit_bytes), meeting_(std::move(meeting)),
      mesh_(meeting_ != nullptr ? meeting_->find(limit_bytes) : nullptr),
      channel_(mesh_ != nullptr ? meeting_->find_channel(mesh_) : nullptr) {
  if (mesh_ != nullptr) end_ = channel_ != nullptr ? channel_->end() : mesh_->open();
  if (!end_) {
    mesh_ = nullptr;
    shm::Segment(0, 1, limit_bytes);
  }
}

ShmEndpoint::~ShmEndpoint() {
  if (end_ && channel_ == nullptr) mesh_->drop(*end_);
}

std::shared_ptr<ShmTransport> ShmEndpoint::connect(c10::intrusive_ptr<c10d::ProcessGroup> group, ShmPlacement placement,
                                                   const std::vector<ShmOffer>& offers,
                                                   std::chrono::milliseconds connect_timeout,
                                                   std::chrono::milliseconds timeout) {
  const auto found = std::ranges::find(placement.addresses, address());
  TDDP_INTERNAL(found != placement.addresses.end() && placement.local_ranks.size() == placement.addresses.size(),
                "this rank is not among those of its host");
  const auto rank = static_cast<int>(found - placement.addresses.begin());
  const auto size = static_cast<int>(placement.addresses.size());
  std::vector<shm::ChannelEnd> ends;
  for (const auto& offer : offers) ends.push_back(offer.end);
  // A rank whose garbage collector was faster may have lost what others still have.
  const bool has_met =
      !offers.empty() && !offers.front().mesh.empty() && std::ranges::all_of(offers, [&](const ShmOffer& offer) {
        return offer.mesh == offers.front().mesh && offer.is_shared == offers.front().is_shared;
      });
  auto mesh = std::exchange(mesh_, nullptr);
  auto channel = std::exchange(channel_, nullptr);
  const auto own_end = std::exchange(end_, std::nullopt);
  if (!has_met) {
    if (own_end && channel == nullptr) mesh->drop(*own_end);
    channel = nullptr;
    auto segment = std::make_shared<shm::Segment>(rank, size, limit_bytes_);
    auto peers = listener_.connect(placement.addresses, rank, *segment, connect_timeout);
    mesh = std::make_shared<shm::Mesh>(placement.addresses.front(), rank, std::move(segment), std::move(peers));
    ends.assign(size, *mesh->open());
    if (meeting_ != nullptr) meeting_->set(mesh, limit_bytes_);
  }
  if (channel == nullptr) {
    channel = std::make_shared<ShmChannel>(placement, std::move(mesh), std::move(ends), timeout);
    if (placement.spans && meeting_ != nullptr) meeting_->set(channel);
  }
  return std::make_shared<ShmTransport>(std::move(group), std::move(placement), std::move(channel), timeout);
}

ShmChannel::ShmChannel(const ShmPlacement& placement, std::shared_ptr<shm::Mesh> mesh,
                       std::vector<shm::ChannelEnd> ends, std::chrono::milliseconds timeout)
    : mesh_(std::move(mesh)), ends_(std::move(ends)) {
  shm::EngineConfig config;
  config.group_ranks = placement.local_ranks;
  config.rank = mesh_->rank();
  config.segments = mesh_->view(ends_);
  config.gone = [this](int peer) { return mesh_->gone(peer); };
  if (timeout.count() > 0) config.timeout = timeout;
  if (placement.spans) {
    outer_ = std::make_unique<C10dOuterLink>(placement.outer_group, mesh_->segment());
    config.outer = outer_.get();
  }
  config.owners = placement.owners;
  config.threads = at::get_num_threads();
  config.run_parallel = [](int threads, const std::function<void()>& body) {
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (auto i = begin; i < end; ++i) body();
    });
  };
  engine_ = std::make_unique<shm::Engine>(std::move(config));
}

ShmChannel::~ShmChannel() {
  engine_.reset();
  const bool forever = outer_ != nullptr && !kept_.empty();  // the process group between hosts may write to it, too
  mesh_->close(ends_, std::make_shared<std::vector<Kept>>(std::move(kept_)), forever);
}

void ShmChannel::drop_finished() {
  std::vector<Kept> finished;  // released without holding the lock
  const std::lock_guard lock(kept_mutex_);
  const auto first = std::partition(kept_.begin(), kept_.end(),
                                    [&](const Kept& kept) { return !kept.until || !engine_->poll(*kept.until); });
  finished.assign(std::make_move_iterator(first), std::make_move_iterator(kept_.end()));
  kept_.erase(first, kept_.end());
}

}  // namespace torchddp::transport
