#include "transport/shm/shm_backend.h"

#include <ATen/Functions.h>

#include <utility>

#include "common/check.h"
#include "transport/shm/shm_call.h"
#include "transport/shm/shm_message.h"

namespace torchddp::transport {

ShmBackend::ShmBackend(std::shared_ptr<ShmTransport> transport, std::chrono::milliseconds timeout)
    : Backend(transport->rank(), transport->size()),
      operations_(std::make_shared<ShmOperations>(std::move(transport), timeout)) {}

ShmBackend::~ShmBackend() { operations_->close_later(); }

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return c10::make_intrusive<Options>(kName, operations_->timeout());
}

void ShmBackend::setTimeout(std::chrono::milliseconds timeout) { operations_->set_timeout(timeout); }

void ShmBackend::abort() { operations_->abort(c10::str("rank ", rank_, " aborted the process group")); }

at::Tensor ShmBackend::allocateTensor(long numel, at::TensorOptions options) {
  TDDP_CHECK(options.device().is_cpu(), "the ", kName, " backend can only allocate CPU tensors, not on ",
             options.device());
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  if (numel == 0) {
    return at::empty({0}, dtype);
  }
  return operations_->open_transport()->shared_bytes(numel * static_cast<int64_t>(c10::elementSize(dtype))).view(dtype);
}

template <typename CallOptions>
ShmCall ShmBackend::begin(c10d::OpType type, const char* title, const CallOptions& options, Tensors inputs,
                          Tensors outputs) {
  const auto timeout = options.timeout.count() > 0 ? options.timeout : operations_->timeout();
  return {*operations_, rank_, size_, {type, title, std::move(inputs), std::move(outputs), timeout, options.asyncOp}};
}

ShmBackend::WorkPtr ShmBackend::start(ShmCall& call) {
  ++started_;
  auto work =
      c10::make_intrusive<ShmCollective>(operations_, rank_, std::move(call.description), std::move(call.parts));
  operations_->start(work);
  return work;
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  auto call = begin(c10d::OpType::ALLREDUCE, "torchddp_shm:all_reduce", options, tensors, tensors);
  call.only(tensors);
  call.all_reduce(tensors, options.reduceOp);
  return start(call);
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  auto call = begin(c10d::OpType::ALLREDUCE_COALESCED, "torchddp_shm:all_reduce_coalesced", options, tensors, tensors);
  TDDP_CHECK(!tensors.empty(), call.where(), ": no tensors");
  call.all_reduce(tensors, options.reduceOp);
  return start(call);
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  auto call = begin(c10d::OpType::REDUCE, "torchddp_shm:reduce", options, tensors, tensors);
  call.only(tensors);
  const auto root = call.root(options.rootRank);
  call.all_reduce(tensors, options.reduceOp, root == rank_, root);
  return start(call);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, Lists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  auto call = begin(c10d::OpType::REDUCE_SCATTER, "torchddp_shm:reduce_scatter", options, {}, outputs);
  const auto& output = call.only(outputs);
  call.description.inputs = call.one_each(inputs, output);
  call.reduce_scatter(output, inputs[0], options.reduceOp);
  return start(call);
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  auto call =
      begin(c10d::OpType::_REDUCE_SCATTER_BASE, "torchddp_shm:reduce_scatter_tensor", options, {input}, {output});
  call.reduce_scatter(output, {input}, options.reduceOp);
  return start(call);
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& options) {
  auto call = begin(c10d::OpType::COALESCED, "torchddp_shm:reduce_scatter_tensor_coalesced", options, inputs, outputs);
  call.check_pairs(outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
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
  for (size_t i = 0; i < inputs.size(); ++i) {
    call.all_gather({outputs[i]}, inputs[i]);
  }
  return start(call);
}

ShmBackend::WorkPtr ShmBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  auto call = begin(c10d::OpType::GATHER, "torchddp_shm:gather", options, inputs, {});
  const auto& input = call.only(inputs);
  const auto root = call.root(options.rootRank);
  call.description.outputs = root == rank_ ? call.one_each(outputs, input) : call.none("outputs", outputs);
  Tensors to_each(static_cast<size_t>(size_), input.flatten().narrow(0, 0, 0));
  to_each[static_cast<size_t>(root)] = input;
  call.all_to_all(call.description.outputs, to_each, root);
  return start(call);
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) {
  auto call = begin(c10d::OpType::SCATTER, "torchddp_shm:scatter", options, {}, outputs);
  const auto& output = call.only(outputs);
  call.check_dense_cpu(outputs);
  const auto root = call.root(options.rootRank);
  call.description.inputs = root == rank_ ? call.one_each(inputs, output) : call.none("inputs", inputs);
  call.scatter(outputs, call.description.inputs, root);
  return start(call);
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  auto call = begin(c10d::OpType::ALLTOALL, "torchddp_shm:all_to_all", options, inputs, outputs);
  const auto size = static_cast<size_t>(size_);
  TDDP_CHECK(inputs.size() == size && outputs.size() == size, call.where(), ": ", inputs.size(), " inputs and ",
             outputs.size(), " outputs, expected ", size, " of each");
  call.all_to_all(outputs, inputs);
  return start(call);
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  auto call = begin(c10d::OpType::ALLTOALL_BASE, "torchddp_shm:all_to_all_single", options, {input}, {output});
  call.check_dense_cpu({output, input});
  call.all_to_all(call.split_rows(output, output_splits), call.split_rows(input, input_splits));
  return start(call);
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  auto call = begin(c10d::OpType::BARRIER, "torchddp_shm:barrier", options, {}, {});
  call.parts.resize(1);
  return start(call);
}

// A send or a receive. The caller may not wait at once, so it may continue after the call.
ShmBackend::WorkPtr ShmBackend::start_message(c10d::OpType type, const char* title, Tensors& tensors, int peer,
                                              int tag) {
  auto call = begin(type, title, c10d::BarrierOptions(), tensors, tensors);
  const auto& tensor = call.only(tensors);
  call.check_dense_cpu(tensors);
  TDDP_CHECK(size_ > 1, call.where(), ": there is no other rank in the group");
  TDDP_CHECK(type == c10d::OpType::RECVANYSOURCE || (peer >= 0 && peer < size_ && peer != rank_), call.where(),
             ": rank ", peer, " is not another rank of this group of ", size_);
  auto message = c10::make_intrusive<ShmMessage>(operations_, rank_, std::move(call.description), tensor, peer, tag);
  operations_->start(message);
  return message;
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int to, int tag) {
  return start_message(c10d::OpType::SEND, "torchddp_shm:send", tensors, to, tag);
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int from, int tag) {
  return start_message(c10d::OpType::RECV, "torchddp_shm:recv", tensors, from, tag);
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return start_message(c10d::OpType::RECVANYSOURCE, "torchddp_shm:recv_any_source", tensors, -1, tag);
}

}  // namespace torchddp::transport
