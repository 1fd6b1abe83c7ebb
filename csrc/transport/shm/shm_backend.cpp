#include "transport/shm/shm_backend.h"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "transport/shm/shm_arguments.h"

namespace torchddp::transport {

struct ShmBackend::Call {
  c10d::OpType type;
  const char* title;  // kName, a colon, and what torch calls it
  std::chrono::milliseconds timeout;
  bool async;
  Tensors inputs, outputs;

  const char* name() const { return title + std::char_traits<char>::length(kName) + 1; }
};

namespace {

using Tensors = ShmBackend::Tensors;

// Neither version counters nor graphs have to know what is copied.
struct BelowAutograd {
  c10::impl::ExcludeDispatchKeyGuard keys{c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  c10::NoGradGuard no_grad;
};

// What is in memory is what is in the tensor.
bool is_plain(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

// The tensors lie in memory one behind the other. Where the first begins.
const std::byte* consecutive(const Tensors& tensors) {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0) {
      continue;
    }
    const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
    if (!is_plain(tensor) || (end != nullptr && data != end)) {
      return nullptr;
    }
    begin = begin != nullptr ? begin : data;
    end = data + bytes_of(tensor);
  }
  return begin;
}

shm::Operation moving(shm::OpKind kind, int64_t bytes, int root = 0) {
  return {.kind = kind,
          .type = kernels::DType::kU8,
          .op = kernels::ReduceOp::kSum,
          .root = root,
          .numel = bytes,
          .input = nullptr,
          .output = nullptr};
}

}  // namespace

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
  TDDP_CHECK(options.device().is_cpu(), "the ", kName, " backend allocates CPU tensors, not on ", options.device());
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  if (numel == 0) {
    return at::empty({0}, dtype);
  }
  return operations_->open_transport()->shared_bytes(numel * static_cast<int64_t>(c10::elementSize(dtype))).view(dtype);
}

ShmBackend::WorkPtr ShmBackend::start(Call call, std::vector<ShmPart> parts) {
  ++started_;
  const auto timeout = call.timeout.count() > 0 ? call.timeout : operations_->timeout();
  return operations_->start(
      rank_, {call.type, call.title, std::move(call.inputs), std::move(call.outputs), timeout, call.async},
      std::move(parts));
}

int ShmBackend::root_of(const Call& call, int64_t root) const {
  TDDP_CHECK(root >= 0 && root < size_, call.name(), " on rank ", rank_, ": root ", root, " is not in [0, ", size_,
             ")");
  return static_cast<int>(root);
}

// The operation's input: where it is if the engine reaches it there, or a copy, after `lead_bytes` that are left free. Not
// `in_place`: the operation writes to it, and the tensor must stay as it is. Returns the memory.
at::Tensor ShmBackend::bring(ShmPart& part, const Tensors& tensors, int64_t lead_bytes, bool in_place) {
  const BelowAutograd guard;
  const auto transport = operations_->open_transport();
  const bool eager = transport->engine().is_eager(part.operation);
  const bool alone = in_place && tensors.size() == 1 && lead_bytes == 0 && is_plain(tensors[0]);
  if (alone && (eager || transport->reaches(tensors[0]))) {
    part.input = tensors[0];
    part.operation.input = tensors[0].const_data_ptr();
    return tensors[0];
  }
  if (eager) {
    part.input = at::empty({std::max<int64_t>(bytes_of(tensors) + lead_bytes, 1)}, at::kByte);
    pack(tensors, data_of(part.input) + lead_bytes);
  } else {
    try {
      part.stage(*transport, tensors, lead_bytes);
    } catch (const TransportError& error) {
      operations_->abort(error.what());  // or the others would wait until their time is up
      throw;
    }
    part.input = part.staging;
  }
  part.operation.input = data_of(part.input);
  return part.input;
}

// The operation's output: right into the tensors if they lie in memory as the engine writes it.
void ShmBackend::take_result(ShmPart& part, const Tensors& tensors) {
  if (const auto* memory = consecutive(tensors)) {
    part.operation.output = const_cast<std::byte*>(memory);
    part.output = tensors[0];
    return;
  }
  auto memory = at::empty({std::max<int64_t>(bytes_of(tensors), 1)}, at::kByte);
  part.operation.output = data_of(memory);
  part.output = memory;
  part.deliver_to(tensors, memory);
}

// `keep`: this rank wants the result.
ShmPart ShmBackend::all_reduce_part(const Call& call, const Tensors& given, const c10d::ReduceOp& op, bool keep,
                                    int root) {
  check_dense_cpu(call.name(), rank_, given);
  const auto tensors = as_real(given, op);
  const auto how = reduction(call.name(), tensors.front().scalar_type(), op);
  ShmPart part;
  part.operation = moving(shm::OpKind::kAllReduce, bytes_of(tensors) / kernels::item_size(how.type), root);
  part.operation.type = how.type;
  part.operation.op = how.op;
  const bool eager = operations_->open_transport()->engine().is_eager(part.operation);
  const auto memory = bring(part, tensors, 0, keep || eager);
  if (!eager) {
    part.operation.output = data_of(memory);
    if (keep && part.staging.defined()) {
      part.deliver_to(tensors, memory);
    }
  } else if (keep) {
    take_result(part, tensors);
  } else {
    part.output = at::empty({std::max<int64_t>(part.operation.bytes(), 1)}, at::kByte);
    part.operation.output = data_of(part.output);
  }
  if (keep && how.average) {
    part.deliver = [tensors, deliver = std::move(part.deliver), size = size_] {
      if (deliver) {
        deliver();
      }
      divide(tensors, size);
    };
  }
  return part;
}

ShmPart ShmBackend::reduce_scatter_part(const Call& call, const at::Tensor& given_output, const Tensors& given_inputs,
                                        const c10d::ReduceOp& op) {
  check_dense_cpu(call.name(), rank_, {given_output});
  check_dense_cpu(call.name(), rank_, given_inputs);
  const auto output = as_real({given_output}, op);
  const auto inputs = as_real(given_inputs, op);
  TDDP_CHECK(output[0].scalar_type() == inputs[0].scalar_type() && bytes_of(inputs) == bytes_of(output) * size_,
             call.name(), " on rank ", rank_, ": input has ", bytes_of(inputs) / inputs[0].element_size(),
             " elements of ", inputs[0].scalar_type(), ", output ", output[0].numel(), " of ", output[0].scalar_type(),
             ", expected ", size_, " times as many in the input as in the output");
  const auto how = reduction(call.name(), output[0].scalar_type(), op);
  ShmPart part;
  part.operation = moving(shm::OpKind::kReduceScatter, bytes_of(inputs) / kernels::item_size(how.type));
  part.operation.type = how.type;
  part.operation.op = how.op;
  bring(part, inputs);
  take_result(part, output);
  if (how.average) {
    part.deliver = [output, deliver = std::move(part.deliver), size = size_] {
      if (deliver) {
        deliver();
      }
      divide(output, size);
    };
  }
  return part;
}

ShmPart ShmBackend::all_gather_part(const Call& call, const Tensors& outputs, const at::Tensor& input) {
  check_dense_cpu(call.name(), rank_, outputs);
  check_dense_cpu(call.name(), rank_, {input});
  TDDP_CHECK(outputs[0].scalar_type() == input.scalar_type() && bytes_of(outputs) == bytes_of(input) * size_,
             call.name(), " on rank ", rank_, ": output has ", bytes_of(outputs) / outputs[0].element_size(),
             " elements of ", outputs[0].scalar_type(), ", input ", input.numel(), " of ", input.scalar_type(),
             ", expected ", size_, " times as many in the output as in the input");
  ShmPart part;
  part.operation = moving(shm::OpKind::kAllGather, bytes_of(input));
  bring(part, {input});
  take_result(part, outputs);
  return part;
}

// `inputs`: for each rank; `outputs`: from each rank, or nothing at all.
ShmPart ShmBackend::all_to_all_part(const Call& call, const Tensors& outputs, const Tensors& inputs, int root) {
  check_dense_cpu(call.name(), rank_, outputs);
  check_dense_cpu(call.name(), rank_, inputs);
  const auto table_bytes = shm::split_table_bytes(size_);
  ShmPart part;
  part.operation = moving(shm::OpKind::kAllToAllSplits, bytes_of(inputs) + table_bytes, root);
  std::vector<int64_t> table{0};
  for (const auto& tensor : inputs) {
    table.push_back(table.back() + bytes_of(tensor));
  }
  const auto memory = bring(part, inputs, table_bytes);
  std::memcpy(data_of(memory), table.data(), table.size() * sizeof(int64_t));
  for (const auto& tensor : outputs) {
    part.operation.expected.push_back(bytes_of(tensor));
  }
  if (!outputs.empty()) {
    take_result(part, outputs);
  }
  return part;
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  Call call{c10d::OpType::ALLREDUCE, "torchddp_shm:all_reduce", options.timeout, options.asyncOp, tensors, tensors};
  only(call.name(), rank_, tensors);
  auto part = all_reduce_part(call, tensors, options.reduceOp, true, 0);
  return start(std::move(call), {std::move(part)});
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  Call call{c10d::OpType::ALLREDUCE_COALESCED,
            "torchddp_shm:all_reduce_coalesced",
            options.timeout,
            options.asyncOp,
            tensors,
            tensors};
  TDDP_CHECK(!tensors.empty(), call.name(), " on rank ", rank_, ": no tensors");
  auto part = all_reduce_part(call, tensors, options.reduceOp, true, 0);
  return start(std::move(call), {std::move(part)});
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  Call call{c10d::OpType::REDUCE, "torchddp_shm:reduce", options.timeout, options.asyncOp, tensors, tensors};
  only(call.name(), rank_, tensors);
  const auto root = root_of(call, options.rootRank);
  auto part = all_reduce_part(call, tensors, options.reduceOp, root == rank_, root);
  return start(std::move(call), {std::move(part)});
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, Lists& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  Call call{c10d::OpType::REDUCE_SCATTER, "torchddp_shm:reduce_scatter", options.timeout, options.asyncOp, {}, outputs};
  const auto& output = only(call.name(), rank_, outputs);
  call.inputs = one_each(call.name(), rank_, size_, inputs, output);
  auto part = reduce_scatter_part(call, output, call.inputs, options.reduceOp);
  return start(std::move(call), {std::move(part)});
}

ShmBackend::WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  Call call{c10d::OpType::_REDUCE_SCATTER_BASE,
            "torchddp_shm:reduce_scatter_tensor",
            options.timeout,
            options.asyncOp,
            {input},
            {output}};
  auto part = reduce_scatter_part(call, output, {input}, options.reduceOp);
  return start(std::move(call), {std::move(part)});
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& options) {
  Call call{c10d::OpType::COALESCED,
            "torchddp_shm:reduce_scatter_tensor_coalesced",
            options.timeout,
            options.asyncOp,
            inputs,
            outputs};
  TDDP_CHECK(outputs.size() == inputs.size(), call.name(), " on rank ", rank_, ": ", outputs.size(), " outputs for ",
             inputs.size(), " inputs");
  std::vector<ShmPart> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    parts.push_back(reduce_scatter_part(call, outputs[i], {inputs[i]}, options.reduceOp));
  }
  return start(std::move(call), std::move(parts));
}

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  Call call{c10d::OpType::BROADCAST, "torchddp_shm:broadcast", options.timeout, options.asyncOp, tensors, tensors};
  const auto& tensor = only(call.name(), rank_, tensors);
  check_dense_cpu(call.name(), rank_, tensors);
  const auto root = root_of(call, options.rootRank);
  ShmPart part;
  part.operation = moving(shm::OpKind::kBroadcast, bytes_of(tensor), root);
  if (root == rank_) {
    bring(part, tensors);
  } else {
    take_result(part, tensors);
  }
  return start(std::move(call), {std::move(part)});
}

ShmBackend::WorkPtr ShmBackend::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  Call call{c10d::OpType::ALLGATHER, "torchddp_shm:all_gather", options.timeout, options.asyncOp, inputs, {}};
  const auto& input = only(call.name(), rank_, inputs);
  call.outputs = one_each(call.name(), rank_, size_, outputs, input);
  auto part = all_gather_part(call, call.outputs, input);
  return start(std::move(call), {std::move(part)});
}

ShmBackend::WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  Call call{c10d::OpType::_ALLGATHER_BASE,
            "torchddp_shm:all_gather_into_tensor",
            options.timeout,
            options.asyncOp,
            {input},
            {output}};
  auto part = all_gather_part(call, {output}, input);
  return start(std::move(call), {std::move(part)});
}

// outputs[rank][i] is what that rank gave as inputs[i].
ShmBackend::WorkPtr ShmBackend::allgather_coalesced(Lists& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  Call call{c10d::OpType::ALLGATHER_COALESCED,
            "torchddp_shm:all_gather_coalesced",
            options.timeout,
            options.asyncOp,
            inputs,
            {}};
  TDDP_CHECK(outputs.size() == static_cast<size_t>(size_), call.name(), " on rank ", rank_, ": ", outputs.size(),
             " lists of outputs for ", size_, " ranks");
  std::vector<ShmPart> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Lists from_each(1);
    for (const auto& list : outputs) {
      TDDP_CHECK(list.size() == inputs.size(), call.name(), " on rank ", rank_, ": a list of ", list.size(),
                 " outputs for ", inputs.size(), " inputs");
      from_each[0].push_back(list[i]);
    }
    parts.push_back(all_gather_part(call, one_each(call.name(), rank_, size_, from_each, inputs[i]), inputs[i]));
  }
  for (const auto& list : outputs) {
    call.outputs.insert(call.outputs.end(), list.begin(), list.end());
  }
  return start(std::move(call), std::move(parts));
}

ShmBackend::WorkPtr ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& options) {
  Call call{c10d::OpType::COALESCED,
            "torchddp_shm:all_gather_into_tensor_coalesced",
            options.timeout,
            options.asyncOp,
            inputs,
            outputs};
  TDDP_CHECK(outputs.size() == inputs.size(), call.name(), " on rank ", rank_, ": ", outputs.size(), " outputs for ",
             inputs.size(), " inputs");
  std::vector<ShmPart> parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    parts.push_back(all_gather_part(call, {outputs[i]}, inputs[i]));
  }
  return start(std::move(call), std::move(parts));
}

ShmBackend::WorkPtr ShmBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  Call call{c10d::OpType::GATHER, "torchddp_shm:gather", options.timeout, options.asyncOp, inputs, {}};
  const auto& input = only(call.name(), rank_, inputs);
  const auto root = root_of(call, options.rootRank);
  if (root == rank_) {
    call.outputs = one_each(call.name(), rank_, size_, outputs, input);
  } else {
    TDDP_CHECK(outputs.empty() || outputs[0].empty(), call.name(), " on rank ", rank_,
               ": outputs on a rank that is not ", "the root");
  }
  Tensors to_each(static_cast<size_t>(size_), input.flatten().narrow(0, 0, 0));
  to_each[static_cast<size_t>(root)] = input;
  auto part = all_to_all_part(call, call.outputs, to_each, root);
  return start(std::move(call), {std::move(part)});
}

ShmBackend::WorkPtr ShmBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) {
  Call call{c10d::OpType::SCATTER, "torchddp_shm:scatter", options.timeout, options.asyncOp, {}, outputs};
  const auto& output = only(call.name(), rank_, outputs);
  check_dense_cpu(call.name(), rank_, outputs);
  const auto root = root_of(call, options.rootRank);
  ShmPart part;
  part.operation = moving(shm::OpKind::kScatter, bytes_of(output) * size_, root);
  if (root == rank_) {
    call.inputs = one_each(call.name(), rank_, size_, inputs, output);
    check_dense_cpu(call.name(), rank_, call.inputs);
    TDDP_CHECK(call.inputs[0].scalar_type() == output.scalar_type(), call.name(), " on rank ", rank_, ": inputs are ",
               call.inputs[0].scalar_type(), ", the output ", output.scalar_type());
    bring(part, call.inputs);
  } else {
    TDDP_CHECK(inputs.empty() || inputs[0].empty(), call.name(), " on rank ", rank_,
               ": inputs on a rank that is not the ", "root");
  }
  take_result(part, outputs);
  return start(std::move(call), {std::move(part)});
}

ShmBackend::WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  Call call{c10d::OpType::ALLTOALL, "torchddp_shm:all_to_all", options.timeout, options.asyncOp, inputs, outputs};
  const auto size = static_cast<size_t>(size_);
  TDDP_CHECK(inputs.size() == size && outputs.size() == size, call.name(), " on rank ", rank_, ": ", inputs.size(),
             " inputs and ", outputs.size(), " outputs, expected ", size, " of each");
  auto part = all_to_all_part(call, outputs, inputs, 0);
  return start(std::move(call), {std::move(part)});
}

ShmBackend::WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  Call call{c10d::OpType::ALLTOALL_BASE,
            "torchddp_shm:all_to_all_single",
            options.timeout,
            options.asyncOp,
            {input},
            {output}};
  check_dense_cpu(call.name(), rank_, {output, input});
  auto part = all_to_all_part(call, split_rows(call.name(), output, output_splits, size_),
                              split_rows(call.name(), input, input_splits, size_), 0);
  return start(std::move(call), {std::move(part)});
}

ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  Call call{c10d::OpType::BARRIER, "torchddp_shm:barrier", options.timeout, options.asyncOp, {}, {}};
  return start(std::move(call), std::vector<ShmPart>(1));
}

namespace {

[[noreturn]] void refuse_point_to_point(const char* name) {
  throw std::runtime_error(c10::str(name, ": the ", ShmBackend::kName,
                                    " backend has collectives only. Use a gloo group for point-to-point operations: ",
                                    "torch.distributed.new_group(backend=\"gloo\")"));
}

}  // namespace

ShmBackend::WorkPtr ShmBackend::send(Tensors& /*tensors*/, int /*to*/, int /*tag*/) { refuse_point_to_point("send"); }

ShmBackend::WorkPtr ShmBackend::recv(Tensors& /*tensors*/, int /*from*/, int /*tag*/) { refuse_point_to_point("recv"); }

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& /*tensors*/, int /*tag*/) { refuse_point_to_point("recv"); }

}  // namespace torchddp::transport
