// The functions of the ops, with the arguments that the dispatcher passes: for register.cpp alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

#include "attention/attention.h"
#include "convolution/cat_channels.h"
#include "convolution/convolution_a16.h"
#include "convolution/convolution_depthwise.h"
#include "convolution/convolution_w8a8.h"
#include "linear/linear_a16.h"
#include "linear/linear_grouped.h"
#include "linear/linear_w8a8.h"
#include "matmul/matmul_a8a8.h"
#include "rowwise/image_activation.h"
#include "rowwise/row_quantize.h"

namespace {

using at::IntArrayRef;
using at::ScalarType;
using at::Tensor;
using qfuse::WeightBits;
using std::optional;

// AOTInductor's proxy executor passes an empty list as None.
using Extras = optional<std::vector<Tensor>>;

std::vector<Tensor> list_of(const Extras& extras) {
  return extras ? *extras : std::vector<Tensor>{};
}

// The rowwise quantization arguments, which all rowwise ops share.
#define QFUSE_ROW_OUTPUT                                                                       \
  const optional<Tensor>&out_scale, const optional<Tensor>&out_zero_point,                     \
      std::string_view formula, double choose_eps, ScalarType scale_dtype,                     \
      ScalarType zero_point_dtype, int64_t quant_min, int64_t quant_max, ScalarType out_dtype, \
      ScalarType compute, bool reciprocal, bool zero_point_first, bool keep, bool keep_sum
#define QFUSE_ROW_OUTPUT_GIVEN                                                                 \
  {                                                                                            \
    out_scale, out_zero_point, formula, choose_eps, scale_dtype, zero_point_dtype, quant_min,  \
        quant_max, out_dtype, compute, reciprocal, zero_point_first, keep, keep_sum            \
  }

Tensor linear_w8a8(const Tensor& x, const Tensor& x_scale, const optional<Tensor>& x_zero_point,
                   const Tensor& w_packed, const Tensor& w_sums, const Tensor& w_scale,
                   const optional<Tensor>& w_zero_point, const optional<Tensor>& bias,
                   Extras extras, std::string_view epilogue, ScalarType product_dtype,
                   ScalarType out_dtype) {
  return qfuse::linear_w8a8({x, x_scale, x_zero_point, w_packed, w_sums, w_scale, w_zero_point,
                             bias, list_of(extras), epilogue, product_dtype},
                            nullptr, out_dtype);
}

Tensor linear_w8a8_quantized(const Tensor& x, const Tensor& x_scale,
                             const optional<Tensor>& x_zero_point, const Tensor& w_packed,
                             const Tensor& w_sums, const Tensor& w_scale,
                             const optional<Tensor>& w_zero_point, const optional<Tensor>& bias,
                             Extras extras, std::string_view epilogue, ScalarType product_dtype,
                             const Tensor& out_scale, const optional<Tensor>& out_zero_point,
                             int64_t quant_min, int64_t quant_max, bool reciprocal,
                             bool zero_point_first, ScalarType out_dtype) {
  const qfuse::Output output{out_scale, out_zero_point, quant_min,
                             quant_max, reciprocal,     zero_point_first};
  return qfuse::linear_w8a8({x, x_scale, x_zero_point, w_packed, w_sums, w_scale, w_zero_point,
                             bias, list_of(extras), epilogue, product_dtype},
                            &output, out_dtype);
}

Tensor convolution_w8a8(const Tensor& x, const Tensor& x_scale,
                        const optional<Tensor>& x_zero_point, const Tensor& w_packed,
                        const Tensor& w_sums, const Tensor& w_scale,
                        const optional<Tensor>& w_zero_point, const optional<Tensor>& bias,
                        IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                        IntArrayRef dilation, IntArrayRef output_padding, bool transposed,
                        int64_t groups, Extras extras, std::string_view epilogue,
                        ScalarType product_dtype,
                        ScalarType out_dtype) {
  return qfuse::convolution_w8a8(
      {x, x_scale, x_zero_point, w_packed, w_sums, w_scale, w_zero_point, bias, list_of(extras),
       epilogue, product_dtype},
      {kernel, stride, padding, dilation, output_padding, transposed, groups}, nullptr, out_dtype);
}

Tensor convolution_w8a8_quantized(
    const Tensor& x, const Tensor& x_scale, const optional<Tensor>& x_zero_point,
    const Tensor& w_packed, const Tensor& w_sums, const Tensor& w_scale,
    const optional<Tensor>& w_zero_point, const optional<Tensor>& bias, IntArrayRef kernel,
    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, IntArrayRef output_padding,
    bool transposed, int64_t groups, Extras extras, std::string_view epilogue,
    ScalarType product_dtype,
    const Tensor& out_scale, const optional<Tensor>& out_zero_point, int64_t quant_min,
    int64_t quant_max, bool reciprocal, bool zero_point_first, ScalarType out_dtype) {
  const qfuse::Output output{out_scale, out_zero_point, quant_min,
                             quant_max, reciprocal,     zero_point_first};
  return qfuse::convolution_w8a8(
      {x, x_scale, x_zero_point, w_packed, w_sums, w_scale, w_zero_point, bias, list_of(extras),
       epilogue, product_dtype},
      {kernel, stride, padding, dilation, output_padding, transposed, groups}, &output, out_dtype);
}

Tensor convolution_depthwise_w8a8(const Tensor& x, const Tensor& x_scale,
                                  const optional<Tensor>& x_zero_point, const Tensor& w_packed,
                                  const Tensor& w_sums, const Tensor& w_scale,
                                  const optional<Tensor>& w_zero_point,
                                  const optional<Tensor>& bias, IntArrayRef kernel,
                                  IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                  Extras extras, std::string_view epilogue,
                                  ScalarType product_dtype,
                                  ScalarType out_dtype) {
  return qfuse::convolution_depthwise_w8a8(
      {x, x_scale, x_zero_point, w_packed, w_sums, w_scale, w_zero_point, bias, list_of(extras),
       epilogue, product_dtype},
      {kernel, stride, padding, dilation, {}, false, 1}, nullptr, out_dtype);
}

Tensor convolution_depthwise_w8a8_quantized(
    const Tensor& x, const Tensor& x_scale, const optional<Tensor>& x_zero_point,
    const Tensor& w_packed, const Tensor& w_sums, const Tensor& w_scale,
    const optional<Tensor>& w_zero_point, const optional<Tensor>& bias, IntArrayRef kernel,
    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, Extras extras,
    std::string_view epilogue, ScalarType product_dtype, const Tensor& out_scale,
    const optional<Tensor>& out_zero_point, int64_t quant_min, int64_t quant_max, bool reciprocal,
    bool zero_point_first, ScalarType out_dtype) {
  const qfuse::Output output{out_scale, out_zero_point, quant_min,
                             quant_max, reciprocal,     zero_point_first};
  return qfuse::convolution_depthwise_w8a8(
      {x, x_scale, x_zero_point, w_packed, w_sums, w_scale, w_zero_point, bias, list_of(extras),
       epilogue, product_dtype},
      {kernel, stride, padding, dilation, {}, false, 1}, &output, out_dtype);
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                 const optional<Tensor>& mask, bool causal, double scale, IntArrayRef order) {
  return qfuse::attention({query, key, value, mask, causal, scale, order});
}

Tensor cat_channels(const Tensor& first, Extras others) {
  std::vector<Tensor> parts = list_of(others);
  parts.insert(parts.begin(), first);
  return qfuse::cat_channels(parts);
}

Tensor image_activation_quantized(const Tensor& first, Extras others,
                                  const optional<Tensor>& x_scale,
                                  const optional<Tensor>& x_zero_point, Extras extras,
                                  std::string_view epilogue, const Tensor& out_scale,
                                  const optional<Tensor>& out_zero_point, int64_t quant_min,
                                  int64_t quant_max, bool reciprocal, bool zero_point_first,
                                  ScalarType out_dtype) {
  std::vector<Tensor> parts = list_of(others);
  parts.insert(parts.begin(), first);
  return qfuse::image_activation_quantized(
      {parts, x_scale, x_zero_point, list_of(extras), epilogue},
      {out_scale, out_zero_point, quant_min, quant_max, reciprocal, zero_point_first}, out_dtype);
}

Tensor matmul_a8a8(const Tensor& x, const Tensor& x_scale, const optional<Tensor>& x_zero_point,
                   const Tensor& other, const Tensor& other_scale,
                   const optional<Tensor>& other_zero_point, Extras extras,
                   std::string_view epilogue, ScalarType product_dtype, ScalarType out_dtype) {
  return qfuse::matmul_a8a8({{x, x_scale, x_zero_point},
                             {other, other_scale, other_zero_point},
                             list_of(extras), epilogue, product_dtype},
                            nullptr, out_dtype);
}

Tensor matmul_a8a8_quantized(const Tensor& x, const Tensor& x_scale,
                             const optional<Tensor>& x_zero_point, const Tensor& other,
                             const Tensor& other_scale, const optional<Tensor>& other_zero_point,
                             Extras extras, std::string_view epilogue, ScalarType product_dtype,
                             const Tensor& out_scale, const optional<Tensor>& out_zero_point,
                             int64_t quant_min, int64_t quant_max, bool reciprocal,
                             bool zero_point_first, ScalarType out_dtype) {
  const qfuse::Output output{out_scale, out_zero_point, quant_min,
                             quant_max, reciprocal,     zero_point_first};
  return qfuse::matmul_a8a8({{x, x_scale, x_zero_point},
                             {other, other_scale, other_zero_point},
                             list_of(extras), epilogue, product_dtype},
                            &output, out_dtype);
}

// Linears of float activations with packed weights.
template <auto Linear>
Tensor weight_only(const Tensor& x, const Tensor& w_packed, const Tensor& w_scale,
                   const optional<Tensor>& w_zero_point, const optional<Tensor>& w_offset,
                   int64_t out_features, const optional<Tensor>& bias, Extras extras,
                   std::string_view epilogue, ScalarType compute, ScalarType out_dtype) {
  return Linear({x, w_packed, w_scale, w_zero_point, w_offset, out_features, bias, list_of(extras),
                 epilogue, compute, out_dtype});
}

Tensor convolution_w8a8_grouped(const Tensor& x, const Tensor& x_scale,
                                const optional<Tensor>& x_zero_point, const Tensor& w_packed,
                                const Tensor& w_sums, const Tensor& w_scale, int64_t out_channels,
                                const optional<Tensor>& bias, IntArrayRef kernel,
                                IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                IntArrayRef output_padding, bool transposed, int64_t groups,
                                Extras extras, std::string_view epilogue, ScalarType product_dtype,
                                ScalarType out_dtype) {
  return qfuse::convolution_w8a8_grouped(
      {x, x_scale, x_zero_point, w_packed, w_sums, w_scale, std::nullopt, bias, list_of(extras),
       epilogue, product_dtype},
      {kernel, stride, padding, dilation, output_padding, transposed, groups}, out_channels,
      nullptr, out_dtype);
}

Tensor convolution_w8a8_grouped_quantized(
    const Tensor& x, const Tensor& x_scale, const optional<Tensor>& x_zero_point,
    const Tensor& w_packed, const Tensor& w_sums, const Tensor& w_scale, int64_t out_channels,
    const optional<Tensor>& bias, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, IntArrayRef output_padding, bool transposed, int64_t groups,
    Extras extras, std::string_view epilogue, ScalarType product_dtype, const Tensor& out_scale,
    const optional<Tensor>& out_zero_point, int64_t quant_min, int64_t quant_max, bool reciprocal,
    bool zero_point_first, ScalarType out_dtype) {
  const qfuse::Output output{out_scale, out_zero_point, quant_min,
                             quant_max, reciprocal,     zero_point_first};
  return qfuse::convolution_w8a8_grouped(
      {x, x_scale, x_zero_point, w_packed, w_sums, w_scale, std::nullopt, bias, list_of(extras),
       epilogue, product_dtype},
      {kernel, stride, padding, dilation, output_padding, transposed, groups}, out_channels,
      &output, out_dtype);
}

// Convolutions of float activations with packed weights.
template <auto Convolution>
Tensor weight_only_convolution(const Tensor& x, const Tensor& w_packed, const Tensor& w_scale,
                               const optional<Tensor>& w_zero_point, int64_t out_channels,
                               const optional<Tensor>& bias, IntArrayRef kernel, IntArrayRef stride,
                               IntArrayRef padding, IntArrayRef dilation,
                               IntArrayRef output_padding, bool transposed, int64_t groups,
                               Extras extras, std::string_view epilogue, ScalarType compute,
                               ScalarType out_dtype) {
  return Convolution({x, w_packed, w_scale, w_zero_point, out_channels, bias, list_of(extras),
                      epilogue, compute, out_dtype},
                     {kernel, stride, padding, dilation, output_padding, transposed, groups});
}

// Linears with groupwise weights of four or eight bits.
template <qfuse::WeightBits Bits>
Tensor linear_grouped(const Tensor& x, const Tensor& x_scale, const optional<Tensor>& x_zero_point,
                      const Tensor& w_packed, const Tensor& w_sums, const Tensor& w_scale,
                      const optional<Tensor>& w_zero_point, int64_t out_features,
                      const optional<Tensor>& bias, Extras extras, std::string_view epilogue,
                      ScalarType product_dtype, ScalarType out_dtype) {
  return qfuse::linear_grouped({Bits, x, x_scale, x_zero_point, w_packed, w_sums, w_scale,
                                w_zero_point, out_features, bias, list_of(extras), epilogue,
                                product_dtype},
                               nullptr, out_dtype);
}

template <qfuse::WeightBits Bits>
Tensor linear_grouped_quantized(const Tensor& x, const Tensor& x_scale,
                                const optional<Tensor>& x_zero_point, const Tensor& w_packed,
                                const Tensor& w_sums, const Tensor& w_scale,
                                const optional<Tensor>& w_zero_point, int64_t out_features,
                                const optional<Tensor>& bias, Extras extras,
                                std::string_view epilogue,
                                ScalarType product_dtype, const Tensor& out_scale,
                                const optional<Tensor>& out_zero_point, int64_t quant_min,
                                int64_t quant_max, bool reciprocal, bool zero_point_first,
                                ScalarType out_dtype) {
  const qfuse::Output output{out_scale, out_zero_point, quant_min,
                             quant_max, reciprocal,     zero_point_first};
  return qfuse::linear_grouped({Bits, x, x_scale, x_zero_point, w_packed, w_sums, w_scale,
                                w_zero_point, out_features, bias, list_of(extras), epilogue,
                                product_dtype},
                               &output, out_dtype);
}

template <qfuse::WeightBits Bits>
qfuse::RowResult linear_grouped_rows(const Tensor& x, const Tensor& x_scale,
                                     const optional<Tensor>& x_zero_point, const Tensor& w_packed,
                                     const Tensor& w_sums, const Tensor& w_scale,
                                     const optional<Tensor>& w_zero_point, int64_t out_features,
                                     const optional<Tensor>& bias, Extras extras,
                                     std::string_view epilogue, ScalarType product_dtype,
                                     ScalarType float_dtype, QFUSE_ROW_OUTPUT) {
  return qfuse::linear_grouped_rows(
      {Bits, x, x_scale, x_zero_point, w_packed, w_sums, w_scale, w_zero_point, out_features, bias,
       list_of(extras), epilogue, product_dtype},
      float_dtype, QFUSE_ROW_OUTPUT_GIVEN);
}

qfuse::RowResult linear_w8a8_rows(const Tensor& x, const Tensor& x_scale,
                                  const optional<Tensor>& x_zero_point, const Tensor& w_packed,
                                  const Tensor& w_sums, const Tensor& w_scale,
                                  const optional<Tensor>& w_zero_point,
                                  const optional<Tensor>& bias, Extras extras,
                                  std::string_view epilogue, ScalarType product_dtype,
                                  ScalarType float_dtype, QFUSE_ROW_OUTPUT) {
  return qfuse::linear_w8a8_rows({x, x_scale, x_zero_point, w_packed, w_sums, w_scale,
                                  w_zero_point, bias, list_of(extras), epilogue, product_dtype},
                                 float_dtype, QFUSE_ROW_OUTPUT_GIVEN);
}

#define QFUSE_ROW_X                                                                \
  const Tensor &x, const optional<Tensor>&x_scale, const optional<Tensor>&x_zero_point, \
      ScalarType x_dtype
#define QFUSE_ROW_RESIDUAL                                                   \
  const optional<Tensor>&residual, const optional<Tensor>&residual_scale,    \
      const optional<Tensor>&residual_zero_point, ScalarType residual_dtype
#define QFUSE_ROW_X_GIVEN \
  { x, x_scale, x_zero_point, x_dtype }
#define QFUSE_ROW_RESIDUAL_GIVEN \
  row_operand(residual, residual_scale, residual_zero_point, residual_dtype)

optional<qfuse::RowOperand> row_operand(const optional<Tensor>& values,
                                        const optional<Tensor>& scale,
                                        const optional<Tensor>& zero_point, ScalarType real) {
  if (!values) return std::nullopt;
  return qfuse::RowOperand{*values, scale, zero_point, real};
}

qfuse::RowResult rms_norm_quantized(QFUSE_ROW_X, QFUSE_ROW_RESIDUAL,
                                    const optional<Tensor>& weight, double eps, ScalarType inner,
                                    ScalarType float_dtype, QFUSE_ROW_OUTPUT) {
  return qfuse::rms_norm_quantized(QFUSE_ROW_X_GIVEN, QFUSE_ROW_RESIDUAL_GIVEN, weight, eps, inner,
                                   float_dtype, QFUSE_ROW_OUTPUT_GIVEN);
}

qfuse::RowResult layer_norm_quantized(QFUSE_ROW_X, QFUSE_ROW_RESIDUAL,
                                      const optional<Tensor>& weight, const optional<Tensor>& bias,
                                      double eps, ScalarType float_dtype, QFUSE_ROW_OUTPUT) {
  return qfuse::layer_norm_quantized(QFUSE_ROW_X_GIVEN, QFUSE_ROW_RESIDUAL_GIVEN, weight, bias,
                                     eps, float_dtype, QFUSE_ROW_OUTPUT_GIVEN);
}

qfuse::RowResult activation_quantized(QFUSE_ROW_X, Extras extras, std::string_view epilogue,
                                      ScalarType float_dtype, QFUSE_ROW_OUTPUT) {
  return qfuse::activation_quantized(QFUSE_ROW_X_GIVEN, list_of(extras), epilogue, float_dtype,
                                     QFUSE_ROW_OUTPUT_GIVEN);
}

#undef QFUSE_ROW_X
#undef QFUSE_ROW_X_GIVEN
#undef QFUSE_ROW_RESIDUAL
#undef QFUSE_ROW_RESIDUAL_GIVEN
#undef QFUSE_ROW_OUTPUT
#undef QFUSE_ROW_OUTPUT_GIVEN

}  // namespace
