#include "transport/shm/shm_call.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "common/check.h"
#include "transport/shm/pieces.h"
#include "transport/shm/shm_backend.h"
#include "transport/sum_types.h"

namespace torchddp::transport {
namespace {

using Tensors = ShmCall::Tensors;
using RedOpType = c10d::ReduceOp::RedOpType;

constexpr const char* kName = ShmBackend::kName;

// The engine's counterpart of each of c10d's reductions, in their order.
std::optional<std::pair<kernels::DType, kernels::ReduceOp>> find_reduction(at::ScalarType dtype, RedOpType op) {
  using kernels::ReduceOp;
  constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax};
  const bool is_bool = dtype == at::kBool;
  const auto type = is_bool ? kernels::DType::kU8 : sum_type(dtype);
  if (!type || static_cast<size_t>(op) >= std::size(kOps) || (is_bool && op == RedOpType::AVG)) {
    return std::nullopt;
  }
  // "Or" and "and" of bytes that are 0 or 1 and stay so.
  const bool is_or = op == RedOpType::SUM || op == RedOpType::MAX;
  return std::pair(*type, !is_bool ? kOps[op] : is_or ? ReduceOp::kMax : ReduceOp::kMin);
}

const char* op_name(RedOpType op) {
  constexpr const char* kNames[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return static_cast<size_t>(op) < std::size(kNames) ? kNames[op] : "an unknown reduction";
}

// Where the first tensor begins, if all are consecutive in memory.
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

void divide(const at::Tensor& tensor, int size) {
  if (at::isFloatingType(tensor.scalar_type())) {
    tensor.div_(size);
  } else {
    tensor.div_(size, "trunc");
  }
}

// Divides the sum in the result to get the average.
void divide_after(ShmPart& part, const Tensors& tensors, int size) {
  part.deliver = [tensors, deliver = std::move(part.deliver), size] {
    if (deliver) {
      deliver();
    }
    for (const auto& tensor : tensors) {
      divide(tensor, size);
    }
  };
}

}  // namespace

ShmCall::ShmCall(ShmOperations& operations, int rank, int size, ShmC10dWork::Description description)
    : description(std::move(description)),
      operations_(operations),
      transport_(operations.open_transport()),
      rank_(rank),
      size_(size) {}

const char* ShmCall::name() const { return description.title + std::char_traits<char>::length(kName) + 1; }

std::string ShmCall::where() const { return c10::str(name(), " on rank ", rank_); }

void ShmCall::check_dense_cpu(const Tensors& tensors) const {
  for (const auto& tensor : tensors) {
    TDDP_CHECK(tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided, where(), ": the ",
               kName, " backend supports only dense CPU tensors, got ",
               tensor.defined() ? c10::str("a ", tensor.layout(), " tensor on ", tensor.device()) : "none");
    TDDP_CHECK(tensor.scalar_type() == tensors.front().scalar_type(), where(), ": tensors of ",
               tensors.front().scalar_type(), " and ", tensor.scalar_type(), " in one operation");
  }
}

const at::Tensor& ShmCall::only(const Tensors& tensors) const {
  TDDP_CHECK(tensors.size() == 1, where(), ": expected one tensor, got ", tensors.size());
  return tensors[0];
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

Tensors ShmCall::none(const char* what, const Lists& lists) const {
  TDDP_CHECK(lists.empty() || lists[0].empty(), where(), ": ", what, " on a rank that is not the root");
  return {};
}

void ShmCall::check_pairs(const Tensors& outputs, const Tensors& inputs) const {
  TDDP_CHECK(outputs.size() == inputs.size(), where(), ": ", outputs.size(), " outputs for ", inputs.size(), " inputs");
}

int ShmCall::root(int64_t root) const {
  TDDP_CHECK(root >= 0 && root < size_, where(), ": root ", root, " is not in [0, ", size_, ")");
  return static_cast<int>(root);
}

Tensors ShmCall::split_rows(const at::Tensor& tensor, const std::vector<int64_t>& splits) const {
  TDDP_CHECK(tensor.dim() > 0, name(), ": a tensor without dimensions can't be split");
  const auto rows = tensor.size(0);
  TDDP_CHECK(splits.empty() ? rows % size_ == 0 : splits.size() == static_cast<size_t>(size_), name(), ": can't split ",
             rows, " rows between ", size_, " ranks",
             splits.empty() ? "" : c10::str(" by ", splits.size(), " split sizes"));
  Tensors parts;
  int64_t begin = 0;
  for (int rank = 0; rank < size_; ++rank) {
    const auto count = splits.empty() ? rows / size_ : splits[static_cast<size_t>(rank)];
    TDDP_CHECK(count >= 0 && begin + count <= rows, name(), ": the split sizes are more than the ", rows, " rows");
    parts.push_back(tensor.narrow(0, begin, count));
    begin += count;
  }
  TDDP_CHECK(begin == rows, name(), ": the split sizes add up to ", begin, ", the tensor has ", rows, " rows");
  return parts;
}

// Complex numbers are added as pairs of real ones.
Tensors ShmCall::as_real(const Tensors& tensors, const c10d::ReduceOp& op) const {
  const bool adds = op.op_ == RedOpType::SUM || op.op_ == RedOpType::AVG;
  Tensors real;
  for (const auto& tensor : tensors) {
    const bool pairs = tensor.is_complex() && adds;
    TDDP_CHECK(!pairs || !tensor.is_conj(), "the ", kName,
               " backend can't reduce a conjugate view: call resolve_conj() first");
    real.push_back(pairs ? at::view_as_real(tensor) : tensor);
  }
  return real;
}

shm::Operation ShmCall::reducing(shm::OpKind kind, const Tensors& tensors, const c10d::ReduceOp& op, int root) const {
  const auto dtype = tensors.front().scalar_type();
  const auto found = find_reduction(dtype, op.op_);
  TDDP_CHECK(
      found, name(), ": the ", kName, " backend has no ", op_name(op.op_), " of ", dtype,
      ". It has SUM, AVG, PRODUCT, MIN and MAX of floats and of integers up to int64, the same except AVG for bool, ",
      "and SUM and AVG of complex numbers");
  const auto [type, reduction] = *found;
  const auto numel = bytes_of(tensors) / kernels::item_size(type);
  return {.kind = kind, .type = type, .op = reduction, .root = root, .numel = numel};
}

// For calls that need memory: if this failed silently the other ranks would wait for their full timeout.
template <typename Take>
void ShmCall::or_abort(Take&& take) const {
  try {
    take();
  } catch (const TransportError& error) {
    operations_.abort(error.what());
    throw;
  }
}

// The operation's input: in place if the engine reaches it, otherwise a copy behind `lead_bytes` that are left free. Not
// `in_place`: the operation writes to its input, and the tensor must stay unchanged. Returns the memory.
at::Tensor ShmCall::bring(ShmPart& part, const Tensors& tensors, int64_t lead_bytes, bool in_place) {
  const BelowAutograd guard;
  const bool eager = transport_->engine().is_eager(part.operation);
  const bool alone = in_place && tensors.size() == 1 && lead_bytes == 0 && is_plain(tensors[0]);
  if (alone && (eager || transport_->reaches(tensors[0]))) {
    part.input = tensors[0];
    part.operation.input = tensors[0].const_data_ptr();
    return tensors[0];
  }
  if (eager) {
    part.input = private_bytes(bytes_of(tensors) + lead_bytes);
    pack(tensors, data_of(part.input) + lead_bytes);
  } else {
    or_abort([&] { part.stage(*transport_, tensors, lead_bytes); });
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
  if (question.accepts) {
    engine.wait(seq, description.timeout);
  }
  return all_accept;
}

ShmPart ShmCall::in_pieces(ShmPart part, const Tensors& tensors, const c10d::ReduceOp& op) const {
  auto* const memory = const_cast<std::byte*>(consecutive(tensors));
  const auto dtype = tensors[0].scalar_type();
  std::function<void(std::byte*, int64_t)> finish;
  if (op.op_ == RedOpType::AVG) {
    finish = [dtype, size = size_](std::byte* sums, int64_t numel) {
      divide(at::from_blob(sums, {numel}, at::dtype(dtype)), size);
    };
  }
  const Pieces pieces{part.operation, memory, description.timeout, finish};
  or_abort([&] { part.staging = transport_->scratch().lend(pieces.bytes(), at::kCPU); });
  part.run = [pieces, transport = transport_, buffers = part.staging] {
    const BelowAutograd guard;
    pieces.run(*transport, buffers);
  };
  return part;
}

// Each rank sums every rank's input into its own tensors. It contributes a copy.
void ShmCall::sum_for_itself(ShmPart& part, const Tensors& tensors) {
  const BelowAutograd guard;
  take_result(part, tensors);
  if (part.deliver) {
    pack(tensors, data_of(part.output));
  }
  const auto bytes = part.operation.bytes();
  or_abort([&] { part.staging = transport_->scratch().lend(bytes, at::kCPU); });
  transport_->copier().copy(data_of(part.staging), part.operation.output, bytes);
  part.operation.form = shm::Form::kEveryone;
  part.operation.input = data_of(part.staging);
}

// Ranks sum for each other in memory that all of them reach; for a few numbers each sums for itself.
void ShmCall::sum_together(ShmPart& part, const Tensors& tensors, bool keep) {
  const bool eager = transport_->engine().is_eager(part.operation);
  const auto memory = bring(part, tensors, 0, keep || eager);
  if (!eager) {
    part.operation.output = data_of(memory);
    if (keep && part.staging.defined()) {
      part.deliver_to(tensors, memory);
    }
  } else if (keep) {
    take_result(part, tensors);
  } else {
    part.output = private_bytes(part.operation.bytes());
    part.operation.output = data_of(part.output);
  }
}

void ShmCall::all_reduce(const Tensors& given, const c10d::ReduceOp& op, bool keep, int root) {
  check_dense_cpu(given);
  const auto tensors = as_real(given, op);
  ShmPart part{{}, reducing(shm::OpKind::kAllReduce, tensors, op, root)};
  const bool for_itself = description.type != c10d::OpType::REDUCE &&
                          Pieces::sum_for_themselves(part.operation, transport_->engine().board());
  if (for_itself && Pieces::are_used(part.operation) && goes_in_pieces(part.operation, tensors)) {
    parts.push_back(in_pieces(std::move(part), tensors, op));
    return;
  }
  if (for_itself) {
    sum_for_itself(part, tensors);
  } else {
    sum_together(part, tensors, keep);
  }
  if (keep && op.op_ == RedOpType::AVG) {
    divide_after(part, tensors, size_);
  }
  parts.push_back(std::move(part));
}

void ShmCall::reduce_scatter(const at::Tensor& given_output, const Tensors& given_inputs, const c10d::ReduceOp& op) {
  check_dense_cpu({given_output});
  check_dense_cpu(given_inputs);
  const auto output = as_real({given_output}, op);
  const auto inputs = as_real(given_inputs, op);
  TDDP_CHECK(output[0].scalar_type() == inputs[0].scalar_type() && bytes_of(inputs) == bytes_of(output) * size_,
             where(), ": input has ", bytes_of(inputs) / inputs[0].element_size(), " elements of ",
             inputs[0].scalar_type(), ", output ", output[0].numel(), " of ", output[0].scalar_type(), ", expected ",
             size_, " times as many in the input as in the output");
  ShmPart part{{}, reducing(shm::OpKind::kReduceScatter, inputs, op, 0)};
  bring(part, inputs);
  take_result(part, output);
  if (op.op_ == RedOpType::AVG) {
    divide_after(part, output, size_);
  }
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

void ShmCall::scatter(const Tensors& outputs, const Tensors& inputs, int root) {
  ShmPart part{{}, of_bytes(shm::OpKind::kScatter, bytes_of(outputs) * size_, root)};
  if (root == rank_) {
    check_dense_cpu(inputs);
    TDDP_CHECK(inputs[0].scalar_type() == outputs[0].scalar_type(), where(), ": inputs are ", inputs[0].scalar_type(),
               ", the output ", outputs[0].scalar_type());
    bring(part, inputs);
  }
  take_result(part, outputs);
  parts.push_back(std::move(part));
}

void ShmCall::all_to_all(const Tensors& outputs, const Tensors& inputs, int root) {
  check_dense_cpu(outputs);
  check_dense_cpu(inputs);
  const auto table_bytes = shm::split_table_bytes(size_);
  ShmPart part{{}, of_bytes(shm::OpKind::kAllToAllSplits, bytes_of(inputs) + table_bytes, root)};
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
  parts.push_back(std::move(part));
}

}  // namespace torchddp::transport
