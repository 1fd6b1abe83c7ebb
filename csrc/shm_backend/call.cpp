#include "shm_backend/call.h"

#include <ATen/Functions.h>

#include <optional>
#include <utility>

#include "shm_backend/backend.h"
#include "shm_backend/pieces.h"
#include "transport/sum_types.h"

namespace torchddp::shm_backend {
namespace {

using Tensors = ShmCall::Tensors;
using RedOpType = c10d::ReduceOp::RedOpType;

constexpr const char* kName = ShmBackend::kName;

bool is_of_pairs(const at::Tensor& tensor, RedOpType op) {
  return tensor.is_complex() && (op == RedOpType::SUM || op == RedOpType::AVG);
}

// The engine's counterparts of c10d's reductions and torch's dtypes; empty if it has none. Bools are bytes that are 0 or 1.
std::optional<kernels::ReduceOp> engine_op(const at::Tensor& tensor, RedOpType op) {
  using kernels::ReduceOp;
  const bool is_bool = tensor.scalar_type() == at::kBool;
  switch (op) {
    case RedOpType::SUM: return is_bool ? ReduceOp::kMax : ReduceOp::kSum;
    case RedOpType::AVG: return is_bool ? std::nullopt : std::optional(ReduceOp::kSum);
    case RedOpType::PRODUCT: return is_bool ? std::optional(ReduceOp::kMin) : std::nullopt;
    case RedOpType::MIN: return ReduceOp::kMin;
    case RedOpType::MAX: return ReduceOp::kMax;
    default: return std::nullopt;
  }
}

std::optional<kernels::DType> engine_type(const at::Tensor& tensor, RedOpType op) {
  const auto dtype = tensor.scalar_type();
  return dtype == at::kBool ? kernels::DType::kU8
                            : sum_type(is_of_pairs(tensor, op) ? c10::toRealValueType(dtype) : dtype);
}

// Where the first tensor begins, if all are consecutive in memory.
const std::byte* consecutive(const Tensors& tensors) {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
    if (!is_plain(tensor) || (end != nullptr && data != end)) return nullptr;
    begin = begin != nullptr ? begin : data;
    end = data + bytes_of(tensor);
  }
  return begin;
}

// Complex numbers are added as pairs of real ones.
Tensors as_real(const Tensors& tensors, RedOpType op) {
  Tensors real;
  for (const auto& tensor : tensors) {
    const bool pairs = is_of_pairs(tensor, op);
    TDDP_CHECK(!pairs || !tensor.is_conj(), "the ", kName,
               " backend can't reduce a conjugate view: call resolve_conj() first");
    real.push_back(pairs ? at::view_as_real(tensor) : tensor);
  }
  return real;
}

void divide(const at::Tensor& tensor, int size) {
  const bool truncates = !at::isFloatingType(tensor.scalar_type());
  tensor.div_(size, truncates ? std::optional<c10::string_view>("trunc") : std::nullopt);
}

// Divides the sum in the result to get the average.
void divide_after(ShmPart& part, const Tensors& tensors, int size) {
  part.deliver = [tensors, deliver = std::move(part.deliver), size] {
    if (deliver) deliver();
    for (const auto& tensor : tensors) divide(tensor, size);
  };
}

}  // namespace

ShmCall::ShmCall(ShmOperations& operations, int size, Description description)
    : description(std::move(description)), operations_(operations), transport_(operations.open_transport()),
      rank_(this->description.rank), size_(size) {}

void ShmCall::check_dense_cpu(const Tensors& tensors) const {
  for (const auto& tensor : tensors) {
    TDDP_CHECK(tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided, where(), ": the ",
               kName, " backend supports only dense CPU tensors, got ",
               tensor.defined() ? c10::str("a ", tensor.layout(), " tensor on ", tensor.device()) : "none");
    TDDP_CHECK(tensor.scalar_type() == tensors.front().scalar_type(), where(), ": tensors of ",
               tensors.front().scalar_type(), " and ", tensor.scalar_type(), " in one operation");
  }
}

const Tensors& ShmCall::one_each(const Lists& lists, const at::Tensor& like) const {
  TDDP_CHECK(lists.size() == 1 && lists[0].size() == static_cast<size_t>(size_), where(), ": expected a list of ",
             size_, " tensors, one for each rank, got ", lists.size() == 1 ? lists[0].size() : lists.size());
  for (const auto& tensor : lists[0]) {
    TDDP_CHECK(tensor.numel() == like.numel(), where(), ": a tensor of ", tensor.numel(),
               " elements in the list, expected ", like.numel(), " as in the single one");
  }
  return lists[0];
}

void ShmCall::check_reduce_scatter(const at::Tensor& output, const Tensors& inputs) const {
  check_dense_cpu({output});
  check_dense_cpu(inputs);
  TDDP_CHECK(output.scalar_type() == inputs[0].scalar_type() && bytes_of(inputs) == bytes_of(output) * size_, where(),
             ": input has ", bytes_of(inputs) / inputs[0].element_size(), " elements of ", inputs[0].scalar_type(),
             ", output ", output.numel(), " of ", output.scalar_type(), ", expected ", size_,
             " times as many in the input as in the output");
}

Tensors ShmCall::split_rows(const at::Tensor& tensor, const std::vector<int64_t>& splits) const {
  TDDP_CHECK(tensor.dim() > 0, where(), ": a tensor without dimensions can't be split");
  const auto rows = tensor.size(0);
  TDDP_CHECK(splits.empty() ? rows % size_ == 0 : splits.size() == static_cast<size_t>(size_), where(),
             ": can't split ", rows, " rows between ", size_, " ranks",
             splits.empty() ? "" : c10::str(" by ", splits.size(), " split sizes"));
  Tensors parts;
  int64_t begin = 0;
  for (int rank = 0; rank < size_; ++rank) {
    const auto count = splits.empty() ? rows / size_ : splits[rank];
    TDDP_CHECK(count >= 0 && begin + count <= rows, where(), ": the split sizes are more than the ", rows, " rows");
    parts.push_back(tensor.narrow(0, begin, count));
    begin += count;
  }
  TDDP_CHECK(begin == rows, where(), ": the split sizes add up to ", begin, ", the tensor has ", rows, " rows");
  return parts;
}

bool ShmCall::can_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  return engine_op(tensor, op.op_) && engine_type(tensor, op.op_);
}

shm::Operation ShmCall::reducing(shm::OpKind kind, const Tensors& tensors, const c10d::ReduceOp& op, int root) const {
  const auto type = engine_type(tensors.front(), op.op_).value();
  return {.kind = kind,
          .type = type,
          .op = engine_op(tensors.front(), op.op_).value(),
          .root = root,
          .numel = bytes_of(tensors) / kernels::item_size(type)};
}

// The operation's input: in place if the engine reaches it, otherwise a copy. Not `in_place`: the operation writes to its
// input, and the tensor must stay unchanged. Returns the memory.
at::Tensor ShmCall::bring(ShmPart& part, const Tensors& tensors, bool in_place) {
  const BelowAutograd guard;
  const bool eager = transport_->engine().is_eager(part.operation);
  const bool alone = in_place && tensors.size() == 1 && is_plain(tensors[0]);
  if (alone && (eager || transport_->reaches(tensors[0]))) {
    part.input = tensors[0];
    part.operation.input = tensors[0].const_data_ptr();
    return tensors[0];
  }
  if (eager) {
    part.input = private_bytes(bytes_of(tensors));
    pack(tensors, data_of(part.input));
  } else {
    part.stage(*transport_, tensors);
    part.input = part.staging;
  }
  part.operation.input = data_of(part.input);
  return part.input;
}

// The operation's output: directly in the tensors if they are laid out in memory as the engine writes it.
void ShmCall::take_result(ShmPart& part, const Tensors& tensors) const {
  if (const auto* memory = consecutive(tensors)) {
    part.operation.output = const_cast<std::byte*>(memory);
    part.output = tensors[0];
    return;
  }
  part.output = private_bytes(bytes_of(tensors));
  part.operation.output = data_of(part.output);
  part.deliver_to(tensors, part.output);
}

// Asks the other ranks, which do the same. See Note [An all-reduce in pieces].
bool ShmCall::goes_in_pieces(const shm::Operation& whole, const Tensors& tensors) const {
  auto& engine = transport_->engine();
  bool all_accept = false;
  auto question = whole;
  question.form = shm::Form::kQuestion;
  question.accepts = !description.async && consecutive(tensors) != nullptr && !transport_->reaches(tensors[0]);
  question.output = question.accepts ? &all_accept : nullptr;
  const auto seq = engine.start(question);
  if (question.accepts) engine.wait(seq, description.timeout);
  return all_accept;
}

ShmPart ShmCall::in_pieces(ShmPart part, const Tensors& tensors, const c10d::ReduceOp& op) const {
  auto whole = part.operation;
  whole.output = const_cast<std::byte*>(consecutive(tensors));
  FinishPiece finish;
  if (op.op_ == RedOpType::AVG) {
    finish = [dtype = tensors[0].scalar_type(), size = size_](std::byte* sums, int64_t numel) {
      divide(at::from_blob(sums, {numel}, at::dtype(dtype)), size);
    };
  }
  part.staging = transport_->scratch().lend(piece_buffer_bytes(whole), at::kCPU);
  part.run = [whole, finish, timeout = description.timeout, transport = transport_, buffers = part.staging] {
    const BelowAutograd guard;
    sum_in_pieces(*transport, whole, buffers, timeout, finish);
  };
  return part;
}

// Each rank sums every rank's input into its own tensors. It contributes a copy.
void ShmCall::sum_for_itself(ShmPart& part, const Tensors& tensors) {
  const BelowAutograd guard;
  take_result(part, tensors);
  if (part.deliver) pack(tensors, data_of(part.output));
  const auto bytes = part.operation.bytes();
  part.staging = transport_->scratch().lend(bytes, at::kCPU);
  transport_->copier().copy(data_of(part.staging), part.operation.output, bytes);
  part.operation.form = shm::Form::kEveryone;
  part.operation.input = data_of(part.staging);
}

// Ranks sum for each other in memory that all of them reach; for a few numbers each sums for itself.
void ShmCall::sum_together(ShmPart& part, const Tensors& tensors, bool keep) {
  const bool eager = transport_->engine().is_eager(part.operation);
  const auto memory = bring(part, tensors, keep || eager);
  if (!eager) {
    part.operation.output = data_of(memory);
    if (keep && part.staging.defined()) part.deliver_to(tensors, memory);
  } else if (keep) {
    take_result(part, tensors);
  } else {
    part.output = private_bytes(part.operation.bytes());
    part.operation.output = data_of(part.output);
  }
}

void ShmCall::all_reduce(const Tensors& given, const c10d::ReduceOp& op, bool keep, int root) {
  const auto tensors = as_real(given, op.op_);
  ShmPart part{{}, reducing(shm::OpKind::kAllReduce, tensors, op, root)};
  const bool for_itself =
      description.type != c10d::OpType::REDUCE && sum_for_themselves(part.operation, transport_->engine().board());
  if (for_itself && may_go_in_pieces(part.operation) && goes_in_pieces(part.operation, tensors)) {
    parts.push_back(in_pieces(std::move(part), tensors, op));
    return;
  }
  if (for_itself) {
    sum_for_itself(part, tensors);
  } else {
    sum_together(part, tensors, keep);
  }
  if (keep && op.op_ == RedOpType::AVG) divide_after(part, tensors, size_);
  parts.push_back(std::move(part));
}

void ShmCall::reduce_scatter(const at::Tensor& given_output, const Tensors& given_inputs, const c10d::ReduceOp& op) {
  const auto output = as_real({given_output}, op.op_);
  const auto inputs = as_real(given_inputs, op.op_);
  ShmPart part{{}, reducing(shm::OpKind::kReduceScatter, inputs, op, 0)};
  bring(part, inputs);
  take_result(part, output);
  if (op.op_ == RedOpType::AVG) divide_after(part, output, size_);
  parts.push_back(std::move(part));
}

void ShmCall::all_gather(const Tensors& outputs, const at::Tensor& input) {
  check_dense_cpu(outputs);
  check_dense_cpu({input});
  TDDP_CHECK(outputs[0].scalar_type() == input.scalar_type() && bytes_of(outputs) == bytes_of(input) * size_, where(),
             ": output has ", bytes_of(outputs) / outputs[0].element_size(), " elements of ", outputs[0].scalar_type(),
             ", input ", input.numel(), " of ", input.scalar_type(), ", expected ", size_,
             " times as many in the output as in the input");
  ShmPart part{{}, of_bytes(shm::OpKind::kAllGather, bytes_of(input))};
  bring(part, {input});
  take_result(part, outputs);
  parts.push_back(std::move(part));
}

void ShmCall::broadcast(const Tensors& tensors, int root) {
  ShmPart part{{}, of_bytes(shm::OpKind::kBroadcast, bytes_of(tensors), root)};
  if (root == rank_) {
    bring(part, tensors);
  } else {
    take_result(part, tensors);
  }
  parts.push_back(std::move(part));
}

}  // namespace torchddp::shm_backend
