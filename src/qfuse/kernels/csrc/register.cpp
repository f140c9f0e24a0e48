// Schemas and dispatch. Fake kernels are in src/qfuse/kernels/ops.py: those have to work with symbolic
// sizes, and must be there before a graph is traced, but not where a compiled one runs.
#include <torch/library.h>

#include "linear_w8a8.h"
#include "select.h"

namespace {

using at::Tensor;
using std::optional;
using std::vector;

#define LINEAR_PARAMETERS                                                                        \
  const Tensor &x, const Tensor &x_scale, const optional<Tensor>&x_zero_point,                   \
      const Tensor &w_packed, const Tensor &w_sums, const Tensor &w_scale,                       \
      const optional<Tensor>&w_zero_point, const optional<Tensor>&bias, vector<Tensor> extras,   \
      std::string_view epilogue, at::ScalarType real
#define LINEAR_ARGUMENTS                                                                         \
  { x, x_scale, x_zero_point, w_packed, w_sums, w_scale, w_zero_point, bias, extras, epilogue, real }
#define LINEAR_SCHEMA                                                                            \
  "Tensor x, Tensor x_scale, Tensor? x_zero_point, Tensor w_packed, Tensor w_sums, "             \
  "Tensor w_scale, Tensor? w_zero_point, Tensor? bias, Tensor[] extras, str epilogue, "          \
  "ScalarType real, "

Tensor linear_w8a8(LINEAR_PARAMETERS, at::ScalarType out_dtype) {
  return qfuse::linear_w8a8(LINEAR_ARGUMENTS, nullptr, out_dtype);
}

Tensor linear_w8a8_quantized(LINEAR_PARAMETERS, const Tensor& out_scale,
                             const optional<Tensor>& out_zero_point, int64_t quant_min,
                             int64_t quant_max, bool reciprocal, bool zero_point_first,
                             at::ScalarType out_dtype) {
  const qfuse::Output output{out_scale, out_zero_point, quant_min, quant_max, reciprocal,
                             zero_point_first};
  return qfuse::linear_w8a8(LINEAR_ARGUMENTS, &output, out_dtype);
}

std::string choose_kernels(std::string_view name) {
  TORCH_CHECK(qfuse::choose_path(name), "no kernel path '", name, "' on this processor");
  return qfuse::chosen_path();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(qfuse, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("linear_w8a8(" LINEAR_SCHEMA "ScalarType out_dtype) -> Tensor", tags);
  m.def("linear_w8a8_quantized(" LINEAR_SCHEMA
        "Tensor out_scale, Tensor? out_zero_point, int quant_min, int quant_max, bool reciprocal, "
        "bool zero_point_first, ScalarType out_dtype) -> Tensor",
        tags);
  m.def("list_kernels() -> str[]", &qfuse::path_names);
  m.def("choose_kernels(str name) -> str", &choose_kernels);
}

TORCH_LIBRARY_IMPL(qfuse, CPU, m) {
  m.impl("linear_w8a8", &linear_w8a8);
  m.impl("linear_w8a8_quantized", &linear_w8a8_quantized);
}
