// NCCL among the processes of one host, through shared memory: really reduces, and checks NCCL's rules.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "gpu/nccl.h"
#include "machine.h"

namespace torchddp::sim {

// Sums are formed in rank order and in the values' own type, as the CPU transports form them. A broken rule is reported beside
// the machine's races: see `broken_rules`.
class SimulatedNccl final : public gpu::Nccl {
 public:
  static std::shared_ptr<SimulatedNccl> here();

  // Since the last call.
  std::vector<std::string> broken_rules();

  int version() override { return 23007; }
  int built_version() const override { return 23007; }
  std::string describe(int result, gpu::Comm comm) override;
  int make_id(gpu::UniqueId* id) override;
  std::vector<std::string> known_numbers() const override { return {}; }
  int init_rank(gpu::Comm* comm, int size, const gpu::UniqueId& id, int rank,
                const gpu::CommSettings& settings) override;
  int async_error(gpu::Comm comm, int* error) override;
  int finalize(gpu::Comm comm) override;
  int destroy(gpu::Comm comm) override;
  int abort(gpu::Comm comm) override;
  int group_start() override;
  int group_end() override;
  int make_pre_mul_sum(gpu::SumOp* op, double scale, kernels::DType type, gpu::Comm comm) override;
  int destroy_op(gpu::SumOp op, gpu::Comm comm) override;
  int all_reduce(const void* input, void* output, int64_t numel, kernels::DType type, gpu::SumOp op, gpu::Comm comm,
                 gpu::Stream stream) override;
  int reduce(void* data, int64_t numel, kernels::DType type, int root, gpu::Comm comm, gpu::Stream stream) override;
  int reduce_scatter(const void* input, void* output, int64_t output_numel, kernels::DType type, gpu::Comm comm,
                     gpu::Stream stream) override;
  int all_gather(const void* input, void* output, int64_t input_numel, kernels::DType type, gpu::Comm comm,
                 gpu::Stream stream) override;
  int broadcast(void* data, int64_t numel, kernels::DType type, int root, gpu::Comm comm, gpu::Stream stream) override;

 private:
  struct Link;
  struct Communicator;
  struct Call;
  struct Group;

  Communicator* use(gpu::Comm comm);
  int submit(Call call);
  int launch(std::vector<Call> calls);
  void enqueue(std::vector<Call> calls);
  void compare_order(Communicator& comm);
  void broken(const std::string& rule);

  std::mutex mutex_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::set<std::string> broken_;
  std::vector<Call> held_back_;
};

}  // namespace torchddp::sim
