#include "shm_backend/gloo.h"

#include <utility>

#include "transport/c10d/group_work.h"

namespace torchddp::shm_backend {
namespace {

using Future = c10::ivalue::Future;
using FuturePtr = c10::intrusive_ptr<Future>;
using Tensors = Gloo::Tensors;

// `reason`: gloo's.
std::exception_ptr failure_of(const Description& description, const std::string& reason) {
  return std::make_exception_ptr(TransportError(c10::str(description.where(), " over gloo failed: ", reason)));
}

// Of a plain tensor. One with a single element may have any stride, which view() refuses.
at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.as_strided({tensor.numel()}, {1}).view(at::kByte); }

// As gloo sends it: plain bytes, one tensor after the other.
at::Tensor bytes_to_send(const Tensors& tensors) {
  if (tensors.size() == 1 && is_plain(tensors[0])) return as_bytes(tensors[0]);
  auto memory = private_bytes(bytes_of(tensors)).narrow(0, 0, bytes_of(tensors));
  pack(tensors, data_of(memory));
  return memory;
}

// Where gloo writes what the tensors get.
at::Tensor bytes_to_receive(OperationMemory& memory, const Tensors& tensors) {
  if (tensors.size() == 1 && is_plain(tensors[0])) return as_bytes(tensors[0]);
  auto room = private_bytes(bytes_of(tensors)).narrow(0, 0, bytes_of(tensors));
  memory.deliver_to(tensors, room);
  return room;
}

Tensors cut(const at::Tensor& bytes, const Tensors& like) {
  Tensors parts;
  int64_t begin = 0;
  for (const auto& tensor : like) {
    parts.push_back(bytes.narrow(0, begin, bytes_of(tensor)));
    begin += bytes_of(tensor);
  }
  return parts;
}

std::vector<int64_t> sizes_of(const Tensors& tensors) {
  std::vector<int64_t> sizes;
  for (const auto& tensor : tensors) sizes.push_back(bytes_of(tensor));
  return sizes;
}

// One that gloo's threads complete.
class GlooCollective final : public c10d::Work {
 public:
  GlooCollective(Description description, OperationMemory memory, Gloo::BackendPtr gloo, Gloo::WorkPtr work,
                 Interruption interruption)
      : Work(description.rank, description.type, description.title, description.inputs),
        description_(std::move(description)), gloo_(std::move(gloo)), interruption_(std::move(interruption)),
        future_(work->getFuture()->then(
            [memory = std::move(memory), description = description_](Future& done) {
              if (done.hasError()) {
                std::rethrow_exception(failure_of(description, done.tryRetrieveErrorMessage()));
              }
              deliver(memory);
              return c10::IValue(description.outputs);
            },
            c10::ListType::create(c10::TensorType::get()))) {}

  bool isCompleted() override { return future_->completed(); }
  bool isSuccess() const override { return future_->completed() && !future_->hasError(); }
  bool wait(std::chrono::milliseconds timeout) override {
    if (!wait_or_keep(gloo_, [&] { return interruption_.wait_for(*future_, timeout); })) {
      throw TransportError(description_.not_complete_after(timeout));
    }
    if (future_->hasError()) std::rethrow_exception(future_->exception_ptr());
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return description_.outputs; }
  FuturePtr getFuture() override { return future_; }

 private:
  const Description description_;
  const Gloo::BackendPtr gloo_;
  const Interruption interruption_;
  const FuturePtr future_;
};

// A message is only known to have arrived once it was waited for.
class GlooMessage final : public c10d::Work {
 public:
  GlooMessage(Description description, OperationMemory memory, Gloo::WorkPtr work)
      : Work(description.rank, description.type, description.title, description.inputs),
        description_(std::move(description)), memory_(std::move(memory)), work_(std::move(work)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    if (!isCompleted()) {
      try {
        work_->wait(timeout);
      } catch (const std::exception& error) {
        finish(failure_of(description_, transport::reason_of(error)));
      }
    }
    if (exception() != nullptr) std::rethrow_exception(exception());
    if (!isCompleted()) {
      deliver(memory_);
      finish();
    }
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void abort() override { work_->abort(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return description_.outputs; }

 private:
  const Description description_;
  const OperationMemory memory_;
  const Gloo::WorkPtr work_;
};

bool is_message(c10d::OpType type) {
  return type == c10d::OpType::SEND || type == c10d::OpType::RECV || type == c10d::OpType::RECVANYSOURCE;
}

}  // namespace

template <typename Begin>
Gloo::WorkPtr Gloo::start(Description description, OperationMemory memory, Begin&& begin) {
  interruption_.check();
  WorkPtr work;
  try {
    const WithoutPythonObjects without_python_objects;
    work = begin();
  } catch (const std::exception& error) {
    std::rethrow_exception(failure_of(description, transport::reason_of(error)));
  }
  if (is_message(description.type)) {
    return c10::make_intrusive<GlooMessage>(std::move(description), std::move(memory), std::move(work));
  }
  return c10::make_intrusive<GlooCollective>(std::move(description), std::move(memory), backend_, std::move(work),
                                             interruption_);
}

Gloo::WorkPtr Gloo::all_reduce(Description description, const Tensors& inputs, const c10d::ReduceOp& op,
                               const Tensors& outputs, int64_t from) {
  const BelowAutograd guard;
  auto sum = inputs[0];  // gloo replaces a sparse one's rows
  OperationMemory memory;
  if (!sum.is_sparse()) {
    sum = private_bytes(bytes_of(inputs)).narrow(0, 0, bytes_of(inputs)).view(sum.scalar_type());
    pack(inputs, data_of(sum));
    memory.deliver_to(outputs, sum.narrow(0, from, sum.numel() - from));
  }
  const c10d::AllreduceOptions options{.reduceOp = op, .timeout = description.timeout};
  return start(std::move(description), std::move(memory), [&] {
    Tensors tensors{sum};
    return backend_->allreduce(tensors, options);
  });
}

Gloo::WorkPtr Gloo::gather(Description description, const at::Tensor& input, int root) {
  const BelowAutograd guard;
  OperationMemory memory;
  std::vector<Tensors> lists;
  if (const auto& outputs = description.outputs; !outputs.empty()) {
    lists.push_back(cut(bytes_to_receive(memory, outputs), outputs));
  }
  const c10d::GatherOptions options{.rootRank = root, .timeout = description.timeout};
  return start(std::move(description), std::move(memory), [&] {
    Tensors inputs{bytes_to_send({input})};
    return backend_->gather(lists, inputs, options);
  });
}

Gloo::WorkPtr Gloo::scatter(Description description, const at::Tensor& output, int root) {
  const BelowAutograd guard;
  OperationMemory memory;
  std::vector<Tensors> lists;
  if (const auto& inputs = description.inputs; !inputs.empty()) lists.push_back(cut(bytes_to_send(inputs), inputs));
  Tensors outputs{bytes_to_receive(memory, {output})};
  const c10d::ScatterOptions options{.rootRank = root, .timeout = description.timeout};
  return start(std::move(description), std::move(memory), [&] { return backend_->scatter(outputs, lists, options); });
}

Gloo::WorkPtr Gloo::all_to_all(Description description, const Tensors& outputs, const Tensors& inputs) {
  const BelowAutograd guard;
  OperationMemory memory;
  auto out = bytes_to_receive(memory, outputs);
  auto in = bytes_to_send(inputs);
  auto out_sizes = sizes_of(outputs);
  auto in_sizes = sizes_of(inputs);
  const c10d::AllToAllOptions options{.timeout = description.timeout};
  return start(std::move(description), std::move(memory),
               [&] { return all_to_all_flat(*backend_, out, in, out_sizes, in_sizes, options); });
}

Gloo::WorkPtr Gloo::send(Description description, const at::Tensor& tensor, int to, int tag) {
  const BelowAutograd guard;
  return start(std::move(description), {}, [&] {
    Tensors tensors{bytes_to_send({tensor})};
    return backend_->send(tensors, to, tag);
  });
}

Gloo::WorkPtr Gloo::receive(Description description, const at::Tensor& tensor, int from, int tag) {
  const BelowAutograd guard;
  OperationMemory memory;
  Tensors tensors{bytes_to_receive(memory, {tensor})};
  return start(std::move(description), std::move(memory),
               [&] { return from < 0 ? backend_->recvAnysource(tensors, tag) : backend_->recv(tensors, from, tag); });
}

}  // namespace torchddp::shm_backend
