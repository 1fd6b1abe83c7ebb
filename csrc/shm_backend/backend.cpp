#include "shm_backend/backend.h"

#include <ATen/Functions.h>

#include <utility>

#include "common/check.h"
#include "shm_backend/call.h"

namespace torchddp::shm_backend {

ShmBackend::ShmBackend(std::shared_ptr<ShmTransport> transport, Gloo::BackendPtr gloo,
                       std::chrono::milliseconds timeout)
    : Backend(transport->rank(), transport->size()),
      operations_(std::make_shared<ShmOperations>(std::move(transport), timeout)), gloo_(std::move(gloo)) {}

ShmBackend::~ShmBackend() { operations_->close_later(); }

at::Tensor ShmBackend::allocateTensor(long numel, at::TensorOptions options) {
  TDDP_CHECK(options.device().is_cpu(), "the ", kName, " backend can only allocate CPU tensors, not on ",
             options.device());
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  if (numel == 0) return at::empty({0}, dtype);
  return operations_->open_transport()->shared_bytes(numel * static_cast<int64_t>(c10::elementSize(dtype))).view(dtype);
}

template <typename CallOptions>
ShmCall ShmBackend::begin(c10d::OpType type, const char* title, const CallOptions& options, Tensors inputs,
                          Tensors outputs) {
  const auto timeout = options.timeout.count() > 0 ? options.timeout : operations_->timeout();
  ++started_;
  return {*operations_, size_, {rank_, type, title, std::move(inputs), std::move(outputs), timeout, options.asyncOp}};
}

ShmBackend::WorkPtr ShmBackend::start(ShmCall& call) {
  auto work = c10::make_intrusive<ShmCollective>(operations_, std::move(call.description), std::move(call.parts));
  operations_->start(work);
  return work;
}

// `keep`: this rank wants the result.
ShmBackend::WorkPtr ShmBackend::reduce_all(ShmCall& call, const Tensors& tensors, const c10d::ReduceOp& op, bool keep,
                                           int root) {
  const bool sparse = call.description.type == c10d::OpType::ALLREDUCE && tensors[0].is_sparse();
  if (!sparse) call.check_dense_cpu(tensors);
  if (sparse || !ShmCall::can_reduce(tensors[0], op)) {
    return gloo_.all_reduce(std::move(call.description), tensors, op, keep ? tensors : Tensors());
  }
  call.all_reduce(tensors, op, keep, root);
  return start(call);
}

ShmBackend::WorkPtr ShmBackend::reduce_parts(ShmCall& call, const at::Tensor& output, const Tensors& inputs,
                                             const c10d::ReduceOp& op) {
  call.check_reduce_scatter(output, inputs);
  if (!ShmCall::can_reduce(output, op)) {
    return gloo_.all_reduce(std::move(call.description), inputs, op, {output}, rank_ * output.numel());
  }
  call.reduce_scatter(output, inputs, op);
  return start(call);
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  auto call = begin(c10d::OpType::ALLREDUCE, "torchddp_shm:all_reduce", options, tensors, tensors);
  call.only(tensors);
  return reduce_all(call, tensors, options.reduceOp);
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  auto call = begin(c10d::OpType::ALLREDUCE_COALESCED, "torchddp_shm:all_reduce_coalesced", options, tensors, tensors);
  TDDP_CHECK(!tensors.empty(), call.where(), ": no tensors");
  return reduce_all(call, tensors, options.reduceOp);
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  auto call = begin(c10d::OpType::REDUCE, "torchddp_shm:reduce", options, tensors, tensors);
  call.only(tensors);
  const auto root = call.root(options.rootRank);
  return reduce_all(call, tensors, options.reduceOp, root == rank_, root);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, Lists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  auto call = begin(c10d::OpType::REDUCE_SCATTER, "torchddp_shm:reduce_scatter", options, {}, outputs);
  const auto& output = call.only(outputs);
  call.description.inputs = call.one_each(inputs, output);
  return reduce_parts(call, output, inputs[0], options.reduceOp);
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  auto call =
      begin(c10d::OpType::_REDUCE_SCATTER_BASE, "torchddp_shm:reduce_scatter_tensor", options, {input}, {output});
  return reduce_parts(call, output, {input}, options.reduceOp);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& options) {
  auto call = begin(c10d::OpType::COALESCED, "torchddp_shm:reduce_scatter_tensor_coalesced", options, inputs, outputs);
  call.check_pairs(outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    call.check_reduce_scatter(outputs[i], {inputs[i]});
    TDDP_CHECK(ShmCall::can_reduce(outputs[i], options.reduceOp), call.where(), ": the ", kName,
               " backend has no such reduction of several ", outputs[i].scalar_type(),
               " tensors at once. It has SUM, AVG, MIN and MAX of floats and of integers up to int64");
    call.reduce_scatter(outputs[i], {inputs[i]}, options.reduceOp);
  }
  return start(call);
}

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  auto call = begin(c10d::OpType::BROADCAST, "torchddp_shm:broadcast", options, tensors, tensors);
  call.only(tensors);
  call.check_dense_cpu(tensors);
  call.broadcast(tensors, call.root(options.rootRank));
  return start(call);
}

ShmBackend::WorkPtr ShmBackend::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  auto call = begin(c10d::OpType::ALLGATHER, "torchddp_shm:all_gather", options, inputs, {});
  const auto& input = call.only(inputs);
  call.description.outputs = call.one_each(outputs, input);
  call.all_gather(outputs[0], input);
  return start(call);
}

ShmBackend::WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  auto call = begin(c10d::OpType::_ALLGATHER_BASE, "torchddp_shm:all_gather_into_tensor", options, {input}, {output});
  call.all_gather({output}, input);
  return start(call);
}

// outputs[rank][i] is what that rank passed as inputs[i].
ShmBackend::WorkPtr ShmBackend::allgather_coalesced(Lists& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  auto call = begin(c10d::OpType::ALLGATHER_COALESCED, "torchddp_shm:all_gather_coalesced", options, inputs, {});
  TDDP_CHECK(outputs.size() == static_cast<size_t>(size_), call.where(), ": ", outputs.size(), " lists of outputs for ",
             size_, " ranks");
  for (size_t i = 0; i < inputs.size(); ++i) {
    Lists from_each(1);
    for (const auto& list : outputs) {
      TDDP_CHECK(list.size() == inputs.size(), call.where(), ": a list of ", list.size(), " outputs for ",
                 inputs.size(), " inputs");
      from_each[0].push_back(list[i]);
    }
    call.all_gather(call.one_each(from_each, inputs[i]), inputs[i]);
  }
  for (const auto& list : outputs) {
    call.description.outputs.insert(call.description.outputs.end(), list.begin(), list.end());
  }
  return start(call);
}

ShmBackend::WorkPtr ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& options) {
  auto call = begin(c10d::OpType::COALESCED, "torchddp_shm:all_gather_into_tensor_coalesced", options, inputs, outputs);
  call.check_pairs(outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) call.all_gather({outputs[i]}, inputs[i]);
  return start(call);
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  auto call = begin(c10d::OpType::BARRIER, "torchddp_shm:barrier", options, {}, {});
  call.parts.resize(1);
  return start(call);
}

// --- over gloo ---

ShmBackend::WorkPtr ShmBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  auto call = begin(c10d::OpType::GATHER, "torchddp_shm:gather", options, inputs, {});
  const auto& input = call.only(inputs);
  const auto root = call.root(options.rootRank);
  call.description.outputs = root == rank_ ? call.one_each(outputs, input) : call.none("outputs", outputs);
  call.check_dense_cpu(inputs);
  call.check_dense_cpu(call.description.outputs);
  return gloo_.gather(std::move(call.description), input, root);
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) {
  auto call = begin(c10d::OpType::SCATTER, "torchddp_shm:scatter", options, {}, outputs);
  const auto& output = call.only(outputs);
  const auto root = call.root(options.rootRank);
  call.description.inputs = root == rank_ ? call.one_each(inputs, output) : call.none("inputs", inputs);
  call.check_dense_cpu(outputs);
  call.check_dense_cpu(call.description.inputs);
  return gloo_.scatter(std::move(call.description), output, root);
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  auto call = begin(c10d::OpType::ALLTOALL, "torchddp_shm:all_to_all", options, inputs, outputs);
  const auto size = static_cast<size_t>(size_);
  TDDP_CHECK(inputs.size() == size && outputs.size() == size, call.where(), ": ", inputs.size(), " inputs and ",
             outputs.size(), " outputs, expected ", size, " of each");
  call.check_dense_cpu(outputs);
  call.check_dense_cpu(inputs);
  return gloo_.all_to_all(std::move(call.description), outputs, inputs);
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  auto call = begin(c10d::OpType::ALLTOALL_BASE, "torchddp_shm:all_to_all_single", options, {input}, {output});
  call.check_dense_cpu({output, input});
  const auto outputs = call.split_rows(output, output_splits);
  const auto inputs = call.split_rows(input, input_splits);
  return gloo_.all_to_all(std::move(call.description), outputs, inputs);
}

// The caller may not wait at once, so it may continue after the call.
ShmCall ShmBackend::begin_message(c10d::OpType type, const char* title, const Tensors& tensors, int peer) {
  auto call = begin(type, title, c10d::BarrierOptions(), tensors, tensors);
  call.only(tensors);
  call.check_dense_cpu(tensors);
  TDDP_CHECK(type == c10d::OpType::RECVANYSOURCE || (peer >= 0 && peer < size_ && peer != rank_), call.where(),
             ": rank ", peer, " is not another rank of this group of ", size_);
  return call;
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int to, int tag) {
  auto call = begin_message(c10d::OpType::SEND, "torchddp_shm:send", tensors, to);
  return gloo_.send(std::move(call.description), tensors[0], to, tag);
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int from, int tag) {
  auto call = begin_message(c10d::OpType::RECV, "torchddp_shm:recv", tensors, from);
  return gloo_.receive(std::move(call.description), tensors[0], from, tag);
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  auto call = begin_message(c10d::OpType::RECVANYSOURCE, "torchddp_shm:recv_any_source", tensors, -1);
  TDDP_CHECK(size_ > 1, call.where(), ": there is no other rank in the group");
  return gloo_.receive(std::move(call.description), tensors[0], -1, tag);
}

}  // namespace torchddp::shm_backend
