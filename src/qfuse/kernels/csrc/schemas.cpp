// The schemas of the kernels.
#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(qfuse, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "linear_w8a8(Tensor x, Tensor x_scale, Tensor? x_zero_point, Tensor w_packed, Tensor w_sums, "
      "Tensor w_scale, Tensor? w_zero_point, Tensor? bias, Tensor[]? extras, str epilogue, "
      "ScalarType product_dtype, ScalarType out_dtype) -> Tensor",
      tags);
  m.def(
      "linear_w8a8_quantized(Tensor x, Tensor x_scale, Tensor? x_zero_point, Tensor w_packed, "
      "Tensor w_sums, Tensor w_scale, Tensor? w_zero_point, Tensor? bias, Tensor[]? extras, "
      "str epilogue, ScalarType product_dtype, Tensor out_scale, Tensor? out_zero_point, "
      "int quant_min, "
      "int quant_max, bool reciprocal, bool zero_point_first, ScalarType out_dtype) -> Tensor",
      tags);
  for (const std::string name : {"linear_w4a16", "linear_w8a16", "linear_w16a32"}) {
    const std::string schema =
        name +
        "(Tensor x, Tensor w_packed, Tensor w_scale, Tensor? w_zero_point, Tensor? w_offset, "
        "int out_features, Tensor? bias, Tensor[]? extras, str epilogue, ScalarType compute, "
        "ScalarType out_dtype) -> Tensor";
    m.def(schema.c_str(), tags);
  }
  const auto define_rows = [&](const std::string& start) {
    const std::string schema =
        start +
        "Tensor? out_scale, Tensor? out_zero_point, str formula, float choose_eps, "
        "ScalarType scale_dtype, ScalarType zero_point_dtype, int quant_min, int quant_max, "
        "ScalarType out_dtype, ScalarType compute, bool reciprocal, bool zero_point_first, "
        "bool keep, bool keep_sum) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)";
    m.def(schema.c_str(), tags);
  };
  define_rows(
      "linear_w8a8_rows(Tensor x, Tensor x_scale, Tensor? x_zero_point, Tensor w_packed, "
      "Tensor w_sums, Tensor w_scale, Tensor? w_zero_point, Tensor? bias, Tensor[]? extras, "
      "str epilogue, ScalarType product_dtype, ScalarType float_dtype, ");
  const std::string x =
      "(Tensor x, Tensor? x_scale, Tensor? x_zero_point, ScalarType x_dtype, ";
  const std::string residual =
      "Tensor? residual, Tensor? residual_scale, Tensor? residual_zero_point, "
      "ScalarType residual_dtype, ";
  define_rows("rms_norm_quantized" + x + residual +
              "Tensor? weight, float eps, ScalarType inner, ScalarType float_dtype, ");
  define_rows("layer_norm_quantized" + x + residual +
              "Tensor? weight, Tensor? bias, float eps, ScalarType float_dtype, ");
  define_rows("activation_quantized" + x +
              "Tensor[]? extras, str epilogue, ScalarType float_dtype, ");
  const std::string output =
      "Tensor out_scale, Tensor? out_zero_point, int quant_min, int quant_max, bool reciprocal, "
      "bool zero_point_first, ";
  const std::string end = "ScalarType out_dtype) -> Tensor";
  const std::string matmul =
      "(Tensor x, Tensor x_scale, Tensor? x_zero_point, Tensor other, Tensor other_scale, "
      "Tensor? other_zero_point, Tensor[]? extras, str epilogue, ScalarType product_dtype, ";
  m.def(("matmul_a8a8" + matmul + end).c_str(), tags);
  m.def(("matmul_a8a8_quantized" + matmul + output + end).c_str(), tags);
  const auto define_grouped = [&](const std::string& name) {
    const std::string start =
        "(Tensor x, Tensor x_scale, Tensor? x_zero_point, Tensor w_packed, Tensor w_sums, "
        "Tensor w_scale, Tensor? w_zero_point, int out_features, Tensor? bias, Tensor[]? extras, "
        "str epilogue, ScalarType product_dtype, ";
    m.def((name + start + end).c_str(), tags);
    m.def((name + "_quantized" + start + output + end).c_str(), tags);
    define_rows(name + "_rows" + start + "ScalarType float_dtype, ");
  };
  define_grouped("linear_w4a8");
  define_grouped("linear_w8a8_grouped");
  const auto define_convolution = [&](const std::string& name, const std::string& weight,
                                      const std::string& window) {
    const std::string start =
        "(Tensor x, Tensor x_scale, Tensor? x_zero_point, Tensor w_packed, Tensor w_sums, "
        "Tensor w_scale, " +
        weight +
        "Tensor? bias, int[] kernel, int[] stride, int[] padding, int[] dilation, " + window +
        "Tensor[]? extras, str epilogue, ScalarType product_dtype, ";
    m.def((name + start + end).c_str(), tags);
    m.def((name + "_quantized" + start + output + end).c_str(), tags);
  };
  const std::string geometry = "int[] output_padding, bool transposed, int groups, ";
  define_convolution("convolution_w8a8", "Tensor? w_zero_point, ", geometry);
  define_convolution("convolution_w8a8_grouped", "int out_channels, ", geometry);
  define_convolution("convolution_depthwise_w8a8", "Tensor? w_zero_point, ", "");
  m.def("attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, float scale, "
        "int[] order) "
        "-> Tensor", tags);
  m.def("cat_channels(Tensor first, Tensor[]? others) -> Tensor", tags);
  m.def(("image_activation_quantized(Tensor first, Tensor[]? others, Tensor? x_scale, "
         "Tensor? x_zero_point, Tensor[]? extras, str epilogue, " + output + end).c_str(), tags);
  for (const std::string name : {"convolution_w4a16", "convolution_w8a16"}) {
    const std::string schema =
        name +
        "(Tensor x, Tensor w_packed, Tensor w_scale, Tensor? w_zero_point, int out_channels, "
        "Tensor? bias, int[] kernel, int[] stride, int[] padding, int[] dilation, "
        "int[] output_padding, bool transposed, int groups, Tensor[]? extras, str epilogue, "
        "ScalarType compute, ScalarType out_dtype) -> Tensor";
    m.def(schema.c_str(), tags);
  }
}
