#include "row_quantize.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>

#include "buffer.h"
#include "choose.h"
#include "kernel_api.h"
#include "operands.h"
#include "quantizer.h"
#include "select.h"

namespace qfuse {
namespace {

// A thread gets at least this much to do; starting a team costs about as much.
constexpr int64_t kLeastElements = 8192;

// Writes one number per row, in the type that somebody asked for.
class Column {
 public:
  Column(at::IntArrayRef shape, at::ScalarType type, const char* what, bool wanted) : type_(type) {
    TORCH_CHECK(type == at::kDouble || type == at::kFloat || type == at::kBFloat16 ||
                    type == at::kHalf || type == at::kLong || type == at::kInt ||
                    type == at::kChar || type == at::kByte,
                what, " cannot have type ", type);
    std::vector<int64_t> sizes = wanted ? shape.vec() : std::vector<int64_t>{0};
    if (wanted) sizes.back() = 1;
    tensor_ = at::empty(sizes, type);
    data_ = tensor_.mutable_data_ptr();
  }

  void put(int64_t row, float value) const {
    switch (type_) {
      case at::kDouble:
        return write<double>(row, value);
      case at::kFloat:
        return write<float>(row, value);
      case at::kBFloat16:
        return write<at::BFloat16>(row, value);
      case at::kHalf:
        return write<at::Half>(row, value);
      case at::kLong:
        return write<int64_t>(row, value == value ? value : 0);
      case at::kInt:
        return write<int32_t>(row, value == value ? value : 0);
      case at::kChar:
        return write<int8_t>(row, value == value ? value : 0);
      default:
        return write<uint8_t>(row, value == value ? value : 0);
    }
  }

  const at::Tensor& tensor() const { return tensor_; }

 private:
  template <class Number>
  void write(int64_t row, float value) const {
    static_cast<Number*>(data_)[row] = static_cast<Number>(value);
  }

  at::ScalarType type_;
  at::Tensor tensor_;
  void* data_;
};

// A row's quantizer. The reciprocal is taken in the type of the scale.
class RowQuantizer {
 public:
  RowQuantizer(const RowOutput& o, Real real)
      : scale_type_(o.scale_dtype),
        chooser_{formula_of(o.formula), real, static_cast<float>(o.quant_min),
                 static_cast<float>(o.quant_max), static_cast<float>(o.eps), o.dtype == at::kByte},
        base_{1.0f, 0.0f, chooser_.low, chooser_.high, !o.reciprocal, o.zero_point_first,
              real_of(o.compute, "compute")} {}

  Chosen choose(Extremes row) const {
    Chosen chosen = qfuse::choose(chooser_, row);
    if (scale_type_ == at::kBFloat16) chosen.scale = rounded(Real::bf16, chosen.scale);
    if (scale_type_ == at::kHalf) chosen.scale = rounded(Real::f16, chosen.scale);
    return chosen;
  }

  Quantizer quantizer(const Chosen& chosen) const {
    Quantizer q = base_;
    q.factor = rounded(q.type, q.divide ? chosen.scale : reciprocal(chosen.scale));
    q.zero = chosen.zero_point;
    return q;
  }

 private:
  float reciprocal(float scale) const {
    if (scale_type_ == at::kDouble) return static_cast<float>(1.0 / scale);
    if (scale_type_ == at::kBFloat16) return rounded(Real::bf16, 1.0f / scale);
    if (scale_type_ == at::kHalf) return rounded(Real::f16, 1.0f / scale);
    return 1.0f / scale;
  }

  at::ScalarType scale_type_;
  Chooser chooser_;
  Quantizer base_;
};

// Everything that a call needs, with what its job points into.
struct Call {
  RowJob job{};
  at::ScalarType real;  // of the result before it is quantized
  at::ScalarType sum;   // of x + residual
  Rows x;
  std::vector<at::Tensor> kept;

  Call(const at::Tensor& tensor, const std::optional<at::Tensor>& residual, bool keep_sum)
      : real(tensor.scalar_type()), sum(real), x(rows_of(tensor)) {
    job.columns = x.columns;
    job.x = {x.tensor.const_data_ptr(), x.ld, real_of(real, "x")};
    job.sum_type = job.x.type;
    if (residual) {
      TORCH_CHECK(residual->sizes() == tensor.sizes(), "residual has shape ", residual->sizes(),
                  ", x has ", tensor.sizes());
      const Rows other = rows_of(*residual);
      kept.push_back(other.tensor);
      job.residual = {other.tensor.const_data_ptr(), other.ld,
                      real_of(residual->scalar_type(), "residual")};
      real = at::promoteTypes(real, residual->scalar_type());
      job.sum_type = real_of(real, "x + residual");
    }
    TORCH_CHECK(residual || !keep_sum, "there is no sum to keep without a residual");
    sum = real;
    job.inner = job.real = job.sum_type;
  }

  const float* vector(const std::optional<at::Tensor>& given, const char* what) {
    if (!given) return nullptr;
    kept.push_back(vector_of(*given, at::kFloat, job.columns, what));
    return kept.back().const_data_ptr<float>();
  }
};

void run(const RowJob& job, int64_t rows, const Path& path, const RowQuantizer& by,
         const Quantizer* given, const Column& scale, const Column& zero) {
  const int64_t grain = kLeastElements / std::max<int64_t>(job.columns, 1) + 1;
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    const Buffer values((job.columns + kBlock) * sizeof(float));
    for (int64_t row = begin; row < end; ++row) {
      const Extremes found = path.rows->compute(job, row, values.as<float>());
      if (given) {
        path.rows->encode(job, row, values.as<float>(), found, *given);
        continue;
      }
      const Chosen chosen = by.choose(found);
      scale.put(row, chosen.scale);
      zero.put(row, chosen.zero_point);
      path.rows->encode(job, row, values.as<float>(), found, by.quantizer(chosen));
    }
  });
}

RowResult quantized(Call& call, const at::Tensor& x, const RowOutput& o) {
  RowJob& job = call.job;
  check_codes(o.dtype, o.quant_min, o.quant_max);
  const bool dynamic = !o.formula.empty();
  TORCH_CHECK(dynamic != o.scale.has_value(), "either out_scale or a formula must be given");
  const auto sizes = x.sizes();
  at::Tensor codes = at::empty(sizes, o.dtype);
  at::Tensor real = at::empty(o.keep ? sizes : at::IntArrayRef{0}, call.real);
  at::Tensor sum = at::empty(o.keep_sum ? sizes : at::IntArrayRef{0}, call.sum);
  job.codes = static_cast<int8_t*>(codes.mutable_data_ptr());
  job.kept_type = real_of(call.real, "the result");
  if (o.keep) job.kept = real.mutable_data_ptr();
  if (o.keep_sum) job.kept_sum = sum.mutable_data_ptr();

  const Column scale(sizes, o.scale_dtype, "scale", dynamic);
  const Column zero(sizes, o.zero_point_dtype, "zero point", dynamic);
  std::optional<Quantizer> given;
  if (!dynamic) {
    given = quantizer_of({*o.scale, o.zero_point, o.quant_min, o.quant_max, o.reciprocal,
                          o.zero_point_first},
                         o.dtype);
    given->type = real_of(o.compute, "compute");
    given->factor = rounded(given->type, given->factor);
    given->zero = rounded(given->type, given->zero);
  }
  if (x.numel() == 0) {
    scale.tensor().fill_(1);  // neutral: nothing is quantized with them
    zero.tensor().fill_(0);
  } else {
    run(job, call.x.rows, path_for(call.x.rows), RowQuantizer(o, job.kept_type),
        given ? &*given : nullptr, scale, zero);
  }
  return {codes, scale.tensor(), zero.tensor(), real, sum};
}

}  // namespace

RowResult rms_norm_quantized(const at::Tensor& x, const std::optional<at::Tensor>& residual,
                             const std::optional<at::Tensor>& weight, double eps,
                             at::ScalarType inner, at::ScalarType real, const RowOutput& output) {
  Call call(x, residual, output.keep_sum);
  call.job.kind = RowKind::rms_norm;
  call.job.eps = static_cast<float>(eps);
  call.job.weight = call.vector(weight, "weight");
  call.job.inner = real_of(inner, "inner");
  call.job.real = real_of(real, "real");
  call.real = real;
  return quantized(call, x, output);
}

RowResult layer_norm_quantized(const at::Tensor& x, const std::optional<at::Tensor>& residual,
                               const std::optional<at::Tensor>& weight,
                               const std::optional<at::Tensor>& bias, double eps,
                               at::ScalarType real, const RowOutput& output) {
  Call call(x, residual, output.keep_sum);
  call.job.kind = RowKind::layer_norm;
  call.job.eps = static_cast<float>(eps);
  call.job.weight = call.vector(weight, "weight");
  call.job.bias = call.vector(bias, "bias");
  call.job.inner = Real::f32;
  call.job.real = real_of(real, "real");
  call.real = real;
  return quantized(call, x, output);
}

RowResult activation_quantized(const at::Tensor& x, const std::vector<at::Tensor>& extras,
                               std::string_view epilogue, at::ScalarType real,
                               const RowOutput& output) {
  Call call(x, std::nullopt, output.keep_sum);
  Epilogue steps{};
  call.real = read_steps(epilogue, extras, x.sizes(), call.real, steps, call.kept);
  TORCH_CHECK(call.real == real, "the epilogue gives ", call.real, ", not ", real);
  call.job.steps = steps.steps;
  std::copy_n(steps.step, kMaxSteps, call.job.step);
  std::copy_n(steps.extra, kMaxExtras, call.job.extra);
  return quantized(call, x, output);
}

}  // namespace qfuse
