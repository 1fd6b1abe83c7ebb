#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings/bindings.h"
#include "kernels/compress.h"
#include "kernels/top_k.h"

namespace torchddp::bindings {
namespace {

// 2^60: sizes in bytes stay far from overflow.
constexpr int64_t kMaxNumel = int64_t{1} << 60;

template <class... Parts>
[[noreturn]] void type_error(const Parts&... parts) {
  throw py::type_error(c10::str(parts...));
}

template <class... Parts>
[[noreturn]] void value_error(const Parts&... parts) {
  throw py::value_error(c10::str(parts...));
}

kernels::Format parse_format(const std::string& name) {
  const auto format = kernels::find_format(name);
  if (!format) value_error("there is no compressed format '", name, "'; allowed are int8, int4, sign, fp16 and bf16");
  return *format;
}

// A contiguous tensor on the CPU, as its elements.
void check_tensor(const at::Tensor& tensor, const char* function, const char* name, at::ScalarType type) {
  if (tensor.scalar_type() != type) {
    type_error(function, ": ", name, " must have elements of type ", type, ", got ", tensor.scalar_type());
  }
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided) {
    type_error(function, ": ", name, " must be a dense CPU tensor, got a ", tensor.layout(), " one on ",
               tensor.device());
  }
  if (!tensor.is_contiguous()) {
    value_error(function, ": ", name, " must be contiguous, got sizes ", tensor.sizes(), " with strides ",
                tensor.strides());
  }
}

void check_numel(const at::Tensor& tensor, const char* function, const char* name, int64_t wanted) {
  if (tensor.numel() != wanted) {
    value_error(function, ": ", name, " must have ", wanted, " elements, got ", tensor.numel());
  }
}

void check_apart(const at::Tensor& a, const char* a_name, const at::Tensor& b, const char* b_name,
                 const char* function) {
  const auto* a_begin = static_cast<const char*>(a.const_data_ptr());
  const auto* b_begin = static_cast<const char*>(b.const_data_ptr());
  if (a_begin < b_begin + b.nbytes() && b_begin < a_begin + a.nbytes()) {
    value_error(function, ": ", a_name, " and ", b_name, " share memory; they must not overlap");
  }
}

int64_t compressed_bytes(const std::string& format, int64_t numel) {
  const auto parsed = parse_format(format);
  if (numel < 0 || numel > kMaxNumel) {
    value_error("compressed_bytes: numel must be between 0 and 2**60, got ", numel);
  }
  return kernels::compressed_bytes(parsed, numel);
}

void compress(const std::string& format, const at::Tensor& source, const at::Tensor& out,
              const std::optional<at::Tensor>& residual, double scale) {
  constexpr const char* kName = "compress";
  const auto parsed = parse_format(format);
  check_tensor(source, kName, "source", at::kFloat);
  check_tensor(out, kName, "out", at::kByte);
  check_numel(out, kName, "out", kernels::compressed_bytes(parsed, source.numel()));
  check_apart(source, "source", out, "out", kName);
  if (residual) {
    check_tensor(*residual, kName, "residual", at::kFloat);
    check_numel(*residual, kName, "residual", source.numel());
    check_apart(source, "source", *residual, "residual", kName);
    check_apart(out, "out", *residual, "residual", kName);
  }
  kernels::compress(parsed, source.const_data_ptr<float>(), source.numel(), out.mutable_data_ptr<uint8_t>(),
                    residual ? residual->mutable_data_ptr<float>() : nullptr, static_cast<float>(scale));
}

void decompress(const std::string& format, const at::Tensor& data, const at::Tensor& out, bool accumulate) {
  constexpr const char* kName = "decompress";
  const auto parsed = parse_format(format);
  check_tensor(data, kName, "data", at::kByte);
  check_tensor(out, kName, "out", at::kFloat);
  check_numel(data, kName, "data", kernels::compressed_bytes(parsed, out.numel()));
  check_apart(data, "data", out, "out", kName);
  kernels::decompress(parsed, data.const_data_ptr<uint8_t>(), out.mutable_data_ptr<float>(), out.numel(), accumulate);
}

void select_top_k(const at::Tensor& source, int64_t k, const at::Tensor& indices, const at::Tensor& values,
                  const std::optional<at::Tensor>& residual, double scale) {
  constexpr const char* kName = "select_top_k";
  check_tensor(source, kName, "source", at::kFloat);
  check_tensor(indices, kName, "indices", at::kInt);
  check_tensor(values, kName, "values", at::kFloat);
  if (source.numel() > kernels::kMaxTopKNumel) {
    value_error(kName, ": source must have at most 2**31 elements, whose indices fit 32 bits; got ", source.numel());
  }
  if (k < 0 || k > source.numel()) {
    value_error(kName, ": k must be between 0 and the ", source.numel(), " elements of source, got ", k);
  }
  check_numel(indices, kName, "indices", k);
  check_numel(values, kName, "values", k);
  check_apart(source, "source", indices, "indices", kName);
  check_apart(source, "source", values, "values", kName);
  check_apart(indices, "indices", values, "values", kName);
  if (residual) {
    check_tensor(*residual, kName, "residual", at::kFloat);
    check_numel(*residual, kName, "residual", source.numel());
    check_apart(source, "source", *residual, "residual", kName);
    check_apart(indices, "indices", *residual, "residual", kName);
    check_apart(values, "values", *residual, "residual", kName);
  }
  kernels::select_top_k(source.const_data_ptr<float>(), source.numel(), k, indices.mutable_data_ptr<int32_t>(),
                        values.mutable_data_ptr<float>(), residual ? residual->mutable_data_ptr<float>() : nullptr,
                        static_cast<float>(scale));
}

}  // namespace

void bind_compress(py::module_& m) {
  m.def("compressed_bytes", &compressed_bytes, py::arg("format"), py::arg("numel"),
        "Bytes that `compress` writes for `numel` floats.");
  m.def("compress", &compress, py::arg("format"), py::arg("source"), py::arg("out"), py::arg("residual") = py::none(),
        py::arg("scale") = 1.0, NoGil(),
        "out = encode(v), v = source * scale + residual; residual = v - decode(out). The formats: "
        "csrc/kernels/compress.h");
  m.def("decompress", &decompress, py::arg("format"), py::arg("data"), py::arg("out"), py::arg("accumulate") = false,
        NoGil(), "out = decode(data), or out += decode(data).");
  m.def("select_top_k", &select_top_k, py::arg("source"), py::arg("k"), py::arg("indices"), py::arg("values"),
        py::arg("residual") = py::none(), py::arg("scale") = 1.0, NoGil(),
        "The k numbers of v = source * scale + residual with the largest |v|; residual = v without them.");
}

}  // namespace torchddp::bindings
