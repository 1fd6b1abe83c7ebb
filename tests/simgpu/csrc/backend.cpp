// torch's operators on the simulated GPU: device type PrivateUse1. They compute with the CPU's kernels on the same memory, in the
// order of their stream.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <set>
#include <source_location>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "machine.h"
#include "transport/scaling.h"

namespace torchddp::sim {
namespace {

constexpr auto kGpu = c10::DeviceType::PrivateUse1;
const c10::Device kDevice{kGpu, 0};

Machine& machine() { return Machine::here(); }

// --- streams and events ---

StreamId id_of(const c10::Stream& stream) { return stream.id() + 1; }
c10::Stream stream_of(StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id - 1); }
EventId id_of(void* event) { return reinterpret_cast<EventId>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kGpu; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream_of(machine().current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(1); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(machine().make_stream()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream_of(machine().make_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(machine().exchange_stream(id_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override { machine().synchronize(id_of(stream)); }
  void synchronizeDevice(c10::DeviceIndex) const override { machine().synchronize(); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(machine().make_event());
    machine().record(id_of(*event), id_of(stream), std::source_location::current());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) machine().wait(id_of(stream), id_of(event), std::source_location::current());
  }
  bool queryEvent(void* event) const override { return event == nullptr || machine().finished(id_of(event)); }
  void synchronizeEvent(void* event) const override { machine().synchronize_event(id_of(event)); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (event != nullptr) machine().destroy_event(id_of(event));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream&) const override {
    machine().defer_release(data.get());
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --- memory ---

struct DeviceMemory final : c10::Allocator {
  static void release(void* data) { machine().release(data); }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, kDevice};
    auto* const data = machine().allocate(static_cast<int64_t>(bytes));
    return {data, data, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

// Kept until the process ends, because a copy that is still queued may use it. torch's own records events for that.
struct PinnedMemory final : c10::Allocator {
  static void keep(void*) {}
  c10::DataPtr allocate(size_t bytes) override {
    auto* const data = std::calloc(1, std::max<size_t>(bytes, 1));
    made.insert(data);
    return {data, data, &keep, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &keep; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  std::set<const void*> made;
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(kGpu, &device_memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* data) const override { return pinned_memory.made.contains(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};

Hooks hooks;
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

// --- operators ---

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kGpu; }

int64_t extent_bytes(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return (last + 1) * static_cast<int64_t>(tensor.itemsize());
}

Range range_of(const at::Tensor& tensor, bool writes) {
  return {tensor.numel() == 0 ? nullptr : tensor.const_data_ptr(), extent_bytes(tensor), writes};
}

// The same memory, for the CPU's kernels.
at::Tensor on_cpu(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto alias = at::from_blob(tensor.unsafeGetTensorImpl()->mutable_data(), tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

// Takes the values away again and writes them in an operation of their own, so that whoever reads them without waiting for the
// stream reads NaNs.
void maybe_late(const std::string& what, const at::Tensor& written) {
  const bool can_be = is_ours(written) && written.numel() > 0 && written.is_non_overlapping_and_dense() &&
                      (written.is_floating_point() || written.is_complex());
  if (!can_be || !machine().is_late()) return;
  auto* const data = static_cast<std::byte*>(written.unsafeGetTensorImpl()->mutable_data());
  const auto bytes = static_cast<size_t>(extent_bytes(written));
  const std::vector<std::byte> values(data, data + bytes);
  std::memset(data, 0xff, bytes);
  machine().queue(machine().current_stream(), what, {range_of(written, true)},
                  [=] { std::memcpy(data, values.data(), bytes); });
}

// The arguments of one call, moved to the CPU and back.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), stack_(stack), captured_(machine().captures(machine().current_stream())) {
    const auto& arguments = op.schema().arguments();
    const auto first = stack.size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      auto& value = stack[first + i];
      auto later = value;
      translate(value, later, alias != nullptr && alias->isWrite());
      if (captured_) later_.push_back(std::move(later));
    }
  }

  const std::vector<Range>& ranges() const { return ranges_; }
  // After the call.
  void take_back() {
    const auto count = op_.schema().returns().size();
    for (size_t i = stack_.size() - count; i < stack_.size(); ++i) {
      auto& value = stack_[i];
      if (value.isTensor()) {
        value = result(value.toTensor());
      } else if (value.isTensorList()) {
        auto tensors = value.toTensorVector();
        for (auto& tensor : tensors) tensor = result(tensor);
        value = tensors;
      } else {
        results_.emplace_back();
      }
    }
    for (const auto& [tensor, now, later] : written_) {
      if (now.sizes() != tensor.sizes()) {  // an empty output was given
        tensor.resize_(now.sizes());
        if (captured_) copies_.emplace_back(later, on_cpu(tensor));
        write(tensor, now);
      }
      maybe_late(name() + "'s late result", tensor);
    }
    if (captured_) add_to_graph();
  }
  std::string name() const { return op_.schema().name(); }

 private:
  // For now, and for replays. In a capture nothing is written now, but to copies.
  std::pair<at::Tensor, at::Tensor> translated(const at::Tensor& tensor, bool writes) {
    if (!is_ours(tensor)) return {tensor, tensor};
    ranges_.push_back(range_of(tensor, writes));
    const auto later = on_cpu(tensor);
    const auto now = captured_ && writes ? later.clone() : later;
    if (writes) written_.push_back({tensor, now, later});
    originals_.emplace(now.unsafeGetTensorImpl(), tensor);
    return {now, later};
  }
  void translate(c10::IValue& now, c10::IValue& later, bool writes) {
    if (now.isTensor()) {
      std::tie(now, later) = translated(now.toTensor(), writes);
    } else if (now.isTensorList()) {
      auto of_now = now.toTensorVector();
      auto of_later = of_now;
      for (size_t i = 0; i < of_now.size(); ++i) std::tie(of_now[i], of_later[i]) = translated(of_now[i], writes);
      now = of_now;
      later = of_later;
    } else if (now.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const std::optional<at::Tensor> tensor : now.toOptionalTensorList()) {
        tensors.push_back(tensor ? std::optional(translated(*tensor, writes).first) : std::nullopt);
      }
      now = later = tensors;
    } else if (now.isDevice()) {
      now = later = c10::Device(c10::kCPU);
    }
  }
  at::Tensor result(const at::Tensor& tensor) {
    auto& made = results_.emplace_back();
    if (!tensor.defined()) return tensor;
    if (const auto found = originals_.find(tensor.unsafeGetTensorImpl()); found != originals_.end())
      return found->second;
    made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(kDevice));
    write(made, tensor);
    written_.push_back({made, made, made});
    return made;
  }
  void write(const at::Tensor& to, const at::Tensor& from) {
    if (captured_) ranges_.push_back(range_of(to, true));
    machine().run_now(machine().current_stream(), name() + "'s result", {range_of(to, true)},
                      [&] { on_cpu(to).copy_(from); });
  }

  // A replay computes with the same memory, and copies the results that have memory of their own.
  void add_to_graph() {
    std::vector<at::Tensor> results;
    for (const auto& made : results_) results.push_back(made.defined() ? on_cpu(made) : made);
    machine().add_to_graph(machine().current_stream(), name(), ranges_,
                           {at_once([op = op_, arguments = later_, results = std::move(results), copies = copies_] {
                             auto stack = arguments;
                             op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
                             size_t next = 0;
                             const auto take = [&](const at::Tensor& tensor) {
                               if (const auto& result = results[next++]; result.defined()) result.copy_(tensor);
                             };
                             for (const auto& value : stack) {
                               if (value.isTensorList()) {
                                 for (const auto& tensor : value.toTensorVector()) take(tensor);
                               } else {
                                 take(value.isTensor() ? value.toTensor() : at::Tensor());
                               }
                             }
                             for (const auto& [from, to] : copies) to.copy_(from);
                           })});
  }

  struct Written {
    at::Tensor tensor, now, later;  // and what the CPU writes
  };
  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const bool captured_;
  std::vector<Range> ranges_;
  std::vector<Written> written_;
  torch::jit::Stack later_;
  std::vector<at::Tensor> results_;  // of the operator, one after the other; those that it made
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
  std::unordered_map<const at::TensorImpl*, at::Tensor> originals_;
};

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Arguments arguments(op, *stack);
  machine().run_now(machine().current_stream(), arguments.name(), arguments.ranges(),
                    [&] { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack); });
  arguments.take_back();
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto stream = machine().current_stream();
  const auto cpu_from = is_ours(from) ? on_cpu(from) : from;
  const auto cpu_to = is_ours(to) ? on_cpu(to) : to;
  std::vector<Range> ranges;
  if (is_ours(from)) ranges.push_back(range_of(from, false));
  if (is_ours(to)) ranges.push_back(range_of(to, true));
  const auto copy = [=] { cpu_to.copy_(cpu_from); };
  const auto& on_host = is_ours(from) ? to : from;
  if (non_blocking && !is_ours(on_host) && on_host.is_pinned()) {
    machine().queue(stream, "a copy with pinned memory", ranges, copy);
    return to;
  }
  if (machine().captures(stream)) {
    if (!is_ours(on_host)) machine().refuse("a copy that waits for the device");
    machine().add_to_graph(stream, "a copy", ranges, {at_once(copy)});
    return to;
  }
  machine().run_now(stream, "a copy", ranges, copy);
  if (is_ours(to)) {
    maybe_late("a late copy", to);
  } else {
    machine().synchronize(stream);
  }
  return to;
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  const auto stream = machine().current_stream();
  machine().run_now(stream, "item()", {range_of(tensor, false)}, [] {});
  machine().synchronize(stream);
  return at::_local_scalar_dense(on_cpu(tensor));
}

const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto bytes = static_cast<size_t>(c10::multiply_integers(size)) * tensor.itemsize();
  const auto& storage = tensor.storage();
  TORCH_CHECK(tensor.storage_offset() == 0 && (bytes <= storage.nbytes() || storage.nbytes() == 0),
              "the simulated GPU resizes empty tensors only");
  if (bytes > storage.nbytes()) {
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(device_memory.allocate(bytes));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

// As on CUDA: products are rounded once. torch's own loop for other devices rounds the factor to the tensors' type first.
void foreach_mul(at::TensorList tensors, const at::Scalar& factor) {
  for (const auto& tensor : tensors) transport::scale_by(tensor, factor.toDouble());
}

void record_stream(at::Tensor& tensor, c10::Stream) { machine().defer_release(tensor.storage().data()); }

at::Tensor& set_storage(at::Tensor& tensor, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, std::move(source), offset, size, stride);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("resize_", &resize);
  m.impl("_foreach_mul_.Scalar", &foreach_mul);
  m.impl("record_stream", &record_stream);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  // Without these, torch looks for a library of convolutions.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// Copies resolve these themselves; torch would do so by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

}  // namespace torchddp::sim
