#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bucket/tensor_checks.h"
#include "kernels/compress.h"
#include "kernels/pack.h"

namespace torchddp::bindings {
namespace {

// 2^58: sizes in bits don't overflow.
constexpr int64_t kMaxNumel = int64_t{1} << 58;

template <class Error, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(c10::str(parts...));
}

struct Argument {
  const char* name;
  at::Tensor tensor;
  at::ScalarType type;
  int64_t numel;
};

// Checks for contiguous CPU tensors that don't overlap. A residual must match the first of them.
void check(const char* function, std::vector<Argument> arguments, const std::optional<at::Tensor>& residual = {}) {
  if (residual) arguments.push_back({"residual", *residual, at::kFloat, arguments.front().numel});
  for (auto one = arguments.begin(); one != arguments.end(); ++one) {
    const auto& [name, tensor, type, numel] = *one;
    if (tensor.scalar_type() != type) {
      fail<py::type_error>(function, ": ", name, " must have elements of type ", type, ", got ", tensor.scalar_type());
    }
    if (!tensor.is_cpu() || tensor.layout() != at::kStrided) {
      fail<py::type_error>(function, ": ", name, " must be a dense CPU tensor, got a ", tensor.layout(), " one on ",
                           tensor.device());
    }
    if (!tensor.is_contiguous()) {
      fail<py::value_error>(function, ": ", name, " must be contiguous, got sizes ", tensor.sizes(), " with strides ",
                            tensor.strides());
    }
    if (tensor.numel() != numel) {
      fail<py::value_error>(function, ": ", name, " must have ", numel, " elements, got ", tensor.numel());
    }
    const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
    for (auto other = arguments.begin(); other != one; ++other) {
      const auto* other_begin = static_cast<const char*>(other->tensor.const_data_ptr());
      if (other_begin < begin + tensor.nbytes() && begin < other_begin + other->tensor.nbytes()) {
        fail<py::value_error>(function, ": ", other->name, " and ", name, " share memory; they must not overlap");
      }
    }
  }
}

float* data_of(const std::optional<at::Tensor>& residual) {
  return residual ? residual->mutable_data_ptr<float>() : nullptr;
}

kernels::Format parse_format(const std::string& name) {
  const auto format = kernels::find_format(name);
  if (!format) {
    fail<py::value_error>("there is no compressed format '", name, "'; allowed are int8, int4, fp16 and bf16");
  }
  return *format;
}

int64_t compressed_bytes(const std::string& format, int64_t numel) {
  const auto parsed = parse_format(format);
  if (numel < 0 || numel > kMaxNumel) {
    fail<py::value_error>("compressed_bytes: numel must be between 0 and 2**58, got ", numel);
  }
  return kernels::compressed_bytes(parsed, numel);
}

void compress(const std::string& format, const at::Tensor& source, const at::Tensor& out,
              const std::optional<at::Tensor>& residual, double scale) {
  const auto numel = source.numel();
  check("compress", {{"source", source, at::kFloat, numel}, {"out", out, at::kByte, compressed_bytes(format, numel)}},
        residual);
  kernels::compress(parse_format(format), source.const_data_ptr<float>(), numel, out.mutable_data_ptr<uint8_t>(),
                    data_of(residual), static_cast<float>(scale));
}

void decompress(const std::string& format, const at::Tensor& data, const at::Tensor& out, bool accumulate) {
  const auto numel = out.numel();
  check("decompress", {{"data", data, at::kByte, compressed_bytes(format, numel)}, {"out", out, at::kFloat, numel}});
  kernels::decompress(parse_format(format), data.const_data_ptr<uint8_t>(), out.mutable_data_ptr<float>(), numel,
                      accumulate);
}

}  // namespace

void bind_kernels(py::module_& m) {
  m.def("cpu_capability", &kernels::cpu_capability,
        "The instruction set the pack kernels use: 'avx512', 'avx2' or 'generic'.");
  m.def("hash_tensor", &bucket::hash_tensor, py::arg("tensor"), NoGil(),
        "A 64-bit hash of the bits of a contiguous CPU tensor.");
  m.def("compressed_bytes", &compressed_bytes, py::arg("format"), py::arg("numel"),
        "Bytes that `compress` writes for `numel` floats.");
  m.def("compress", &compress, py::arg("format"), py::arg("source"), py::arg("out"), py::arg("residual") = py::none(),
        py::arg("scale") = 1.0, NoGil(),
        "out = encode(v), v = source * scale + residual; residual = v - decode(out). The formats: "
        "csrc/kernels/compress.h");
  m.def("decompress", &decompress, py::arg("format"), py::arg("data"), py::arg("out"), py::arg("accumulate") = false,
        NoGil(), "out = decode(data), or out += decode(data).");
}

}  // namespace torchddp::bindings
