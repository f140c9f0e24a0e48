#include "rowwise/row_quantize.h"

#include <c10/core/ScalarType.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>

#include "linear/buffer.h"
#include "rowwise/choose.h"
#include "kernel_api.h"
#include "linear/operands.h"
#include "quantized/stored.h"
#include "rowwise/quantizer.h"
#include "isa/select.h"
#include "parallel.h"
#include "tensors.h"

namespace qfuse {
namespace {

// Minimum work per thread; starting a team costs about as much.
constexpr int64_t kLeastElements = 8192;

// A strip of rows takes about half of a core's L2 cache; but weights are read once per strip, so it
// has a minimum number of rows.
constexpr int64_t kScratchBytes = int64_t{1} << 19;
constexpr int64_t kLeastRows = 32;
// Rows that are computed before the first of them is quantized, while they fit into half of the L1
// cache.
constexpr int64_t kMostRowsAtOnce = 4;
constexpr int64_t kLeastRowsAtOnce = 2;
constexpr int64_t kRowBytes = int64_t{1} << 14;

int64_t rows_at_once(int64_t ld) {
  const int64_t fitting = kRowBytes / (ld * static_cast<int64_t>(sizeof(float)));
  return std::clamp(fitting, kLeastRowsAtOnce, kMostRowsAtOnce);
}

// From this many rows per thread, it is faster if each thread reads all weights for its own strip
// than if threads share a strip and synchronize.
constexpr int64_t kLeastRowsApart = 64;

// Writes one value per row, in the requested type.
class Column {
 public:
  Column(at::IntArrayRef shape, at::ScalarType type, const char* what, bool wanted) : type_(type) {
    TORCH_CHECK(type == at::kDouble || type == at::kFloat || type == at::kBFloat16 ||
                    type == at::kHalf || type == at::kLong || type == at::kInt ||
                    type == at::kChar || type == at::kByte,
                what, " cannot have type ", type);
    std::vector<int64_t> sizes = wanted ? shape.vec() : std::vector<int64_t>{0};
    if (wanted) sizes.back() = 1;
    tensor_ = empty_tensor(sizes, type);
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

// A row's quantizer. The reciprocal is computed in the type of the scale.
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

// Everything that a call needs, with the memory that its job points to.
struct Call {
  RowJob job{};
  at::ScalarType real;  // of the float result
  at::ScalarType sum;   // of x + residual
  Rows x;
  std::vector<at::Tensor> kept;

  Call(const RowOperand& given, const std::optional<RowOperand>& residual, bool keep_sum)
      : real(given.real), sum(real), x(rows_of(given.values)) {
    job.columns = x.columns;
    job.x = source(given, x, "x");
    job.sum_type = job.x.real;
    if (residual) {
      const at::Tensor& values = residual->values;
      TORCH_CHECK(values.sizes() == given.values.sizes(), "residual has shape ", values.sizes(),
                  ", x has ", given.values.sizes());
      const Rows other = rows_of(values);
      kept.push_back(other.tensor);
      job.residual = source(*residual, other, "residual");
      real = at::promoteTypes(real, residual->real);
      job.sum_type = real_of(real, "x + residual");
    }
    TORCH_CHECK(residual || !keep_sum, "there is no sum to keep without a residual");
    sum = real;
    job.inner = job.real = job.sum_type;
  }

  RowSource source(const RowOperand& given, const Rows& rows, const char* what) {
    const at::ScalarType type = rows.tensor.scalar_type();
    const Element element = element_of(type, what);
    const bool stored = element >= Element::s8;
    TORCH_CHECK(stored == given.scale.has_value() && (stored || !given.zero_point), what, " is ",
                type, ": 8-bit values need a scale, floats have neither scale nor zero point");
    TORCH_CHECK(stored || type == given.real, what, " is ", type, ", not ", given.real);
    RowSource from{{rows.tensor.const_data_ptr(), rows.ld, element},
                   real_of(given.real, what), nullptr, nullptr, 0};
    if (!stored) return from;
    const at::Tensor none = filled_tensor({1}, 0, at::kFloat);
    const at::Tensor& zero = given.zero_point ? *given.zero_point : none;
    const bool each = given.scale->numel() != 1 || zero.numel() != 1;
    const int64_t count = each ? rows.rows : 1;
    from.step = each;
    // A zero point of 8-bit values is exact in float32.
    kept.push_back(vector_of(*given.scale, at::kFloat, count, what));
    from.scale = kept.back().const_data_ptr<float>();
    kept.push_back(vector_of(zero.to(at::kFloat), at::kFloat, count, what));
    from.zero = kept.back().const_data_ptr<float>();
    return from;
  }

  const float* vector(const std::optional<at::Tensor>& given, const char* what) {
    if (!given) return nullptr;
    kept.push_back(vector_of(*given, at::kFloat, job.columns, what));
    return kept.back().const_data_ptr<float>();
  }
};

// The result tensors of a call, and how rows are written to them.
class Results {
 public:
  // `real` is the type of the float result, `sum` that of x + residual.
  Results(at::IntArrayRef shape, at::ScalarType real, at::ScalarType sum, const RowOutput& o)
      : dynamic_(!o.formula.empty()),
        real_type_(real_of(real, "the result")),
        by_(o, real_type_),
        scale_(shape, o.scale_dtype, "scale", dynamic_),
        zero_(shape, o.zero_point_dtype, "zero point", dynamic_) {
    check_codes(o.dtype, o.quant_min, o.quant_max);
    TORCH_CHECK(dynamic_ != o.scale.has_value(), "either out_scale or a formula must be given");
    codes_ = empty_tensor(shape, o.dtype);
    kept_ = empty_tensor(o.keep ? shape : at::IntArrayRef{0}, real);
    sum_ = empty_tensor(o.keep_sum ? shape : at::IntArrayRef{0}, sum);
    if (dynamic_) return;
    given_ = quantizer_of({*o.scale, o.zero_point, o.quant_min, o.quant_max, o.reciprocal,
                           o.zero_point_first},
                          o.dtype);
    given_->type = real_of(o.compute, "compute");
    given_->factor = rounded(given_->type, given_->factor);
    given_->zero = rounded(given_->type, given_->zero);
  }

  bool empty() const { return codes_.numel() == 0; }

  // Binds the outputs of a job to the tensors' rows from `first` on.
  void bind(RowJob& job, int64_t first) const {
    const auto at = [&](const at::Tensor& tensor) -> void* {
      if (tensor.numel() == 0) return nullptr;
      const int64_t offset = first * job.columns * static_cast<int64_t>(tensor.element_size());
      return static_cast<char*>(tensor.mutable_data_ptr()) + offset;
    };
    job.codes = static_cast<int8_t*>(at(codes_));
    job.kept_type = real_type_;
    job.kept = at(kept_);
    job.kept_sum = at(sum_);
  }

  // Computes and quantizes `count` rows of a job that is bound to those from `first` on.
  void encode(const RowJob& job, int64_t first, int64_t count, const Path& path) const {
    const int64_t grain = kLeastElements / std::max<int64_t>(job.columns, 1) + 1;
    const int64_t ld = (job.columns + 2 * kBlock - 1) / kBlock * kBlock;
    const int64_t most = rows_at_once(ld);
    parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
      const Buffer values(most * ld * static_cast<int64_t>(sizeof(float)));
      if (given_ && given_->plain && given_->type == Real::f32) {
        return path.rows->write(job, begin, end - begin, values.as<float>(), ld, *given_);
      }
      std::array<Extremes, kMostRowsAtOnce> found;
      for (int64_t row = begin; row < end; row += most) {
        const int64_t some = std::min(most, end - row);
        path.rows->compute(job, row, some, values.as<float>(), ld, found.data());
        for (int64_t i = 0; i < some; ++i) {
          encode_row(job, first, row + i, values.as<float>() + i * ld, found[i], path);
        }
      }
    });
  }

  RowResult give() const {
    if (empty()) {
      scale_.tensor().fill_(1);  // neutral, since the result is empty
      zero_.tensor().fill_(0);
    }
    return {codes_, scale_.tensor(), zero_.tensor(), kept_, sum_};
  }

 private:
  // Quantizes a row that was computed.
  void encode_row(const RowJob& job, int64_t first, int64_t row, const float* values,
                  const Extremes& found, const Path& path) const {
    if (given_) return path.rows->encode(job, row, values, found, *given_);
    const Chosen chosen = by_.choose(found);
    scale_.put(first + row, chosen.scale);
    zero_.put(first + row, chosen.zero_point);
    path.rows->encode(job, row, values, found, by_.quantizer(chosen));
  }

  bool dynamic_;
  Real real_type_;
  RowQuantizer by_;
  Column scale_;
  Column zero_;
  std::optional<Quantizer> given_;
  at::Tensor codes_;
  at::Tensor kept_;
  at::Tensor sum_;
};

RowResult quantized(Call& call, const RowOperand& x, const RowOutput& o) {
  const Results results(x.values.sizes(), call.real, call.sum, o);
  results.bind(call.job, 0);
  if (!results.empty()) {
    results.encode(call.job, 0, call.x.rows, path_for(call.x.rows));
  }
  return results.give();
}

// How rows are split into strips.
struct Strips {
  int64_t count;
  int64_t rows;  // of each strip but the last
  bool apart;    // each strip is computed by one thread; otherwise all threads share each strip
};

Strips strips_of(int64_t rows, int64_t row_bytes, int64_t multiple) {
  const auto whole = [&](int64_t some) { return (some + multiple - 1) / multiple * multiple; };
  const int64_t threads = at::get_num_threads();
  const int64_t fitting = std::max(kScratchBytes / row_bytes, kLeastRows);
  const int64_t most = std::max(fitting / multiple * multiple, multiple);
  int64_t count = (rows + most - 1) / most;
  const bool apart = rows >= threads * kLeastRowsApart;
  if (apart) count = (count + threads - 1) / threads * threads;
  const int64_t each = whole((rows + count - 1) / count);
  count = (rows + each - 1) / each;
  return {count, each, apart && count >= threads};
}

}  // namespace

RowResult quantize_rows(at::IntArrayRef shape, at::ScalarType type, const RowOutput& output,
                        int64_t multiple, const ComputeRows& compute) {
  TORCH_CHECK(!output.keep_sum, "there is no sum to keep without a residual");
  const Results results(shape, type, type, output);
  if (results.empty()) return results.give();
  const int64_t columns = shape.back();
  const int64_t rows = c10::multiply_integers(shape) / columns;
  const int64_t ld = (columns + kBlock - 1) / kBlock * kBlock;
  const int64_t row_bytes = ld * static_cast<int64_t>(sizeof(float));
  const Strips strips = strips_of(rows, row_bytes, multiple);
  const Path& path = path_for(rows);
  const auto work = [&](int64_t begin, int64_t end) {
    const Buffer scratch(strips.rows * row_bytes);
    for (int64_t strip = begin; strip < end; ++strip) {
      const int64_t first = strip * strips.rows;
      const int64_t count = std::min(strips.rows, rows - first);
      compute(first, count, scratch.as<float>(), ld);
      RowJob job{};
      job.columns = columns;
      job.x = {{scratch.get(), ld, Element::f32}, Real::f32, nullptr, nullptr, 0};
      results.bind(job, first);
      results.encode(job, first, count, path);
    }
  };
  if (strips.apart) {
    parallel_for(0, strips.count, 1, work);
  } else {
    work(0, strips.count);
  }
  return results.give();
}

RowResult rms_norm_quantized(const RowOperand& x, const std::optional<RowOperand>& residual,
                             const std::optional<at::Tensor>& weight, double eps,
                             at::ScalarType inner, at::ScalarType float_dtype,
                             const RowOutput& output) {
  Call call(x, residual, output.keep_sum);
  call.job.kind = RowKind::rms_norm;
  call.job.eps = static_cast<float>(eps);
  call.job.weight = call.vector(weight, "weight");
  call.job.inner = real_of(inner, "inner");
  call.job.real = real_of(float_dtype, "float_dtype");
  call.real = float_dtype;
  return quantized(call, x, output);
}

RowResult layer_norm_quantized(const RowOperand& x, const std::optional<RowOperand>& residual,
                               const std::optional<at::Tensor>& weight,
                               const std::optional<at::Tensor>& bias, double eps,
                               at::ScalarType float_dtype, const RowOutput& output) {
  Call call(x, residual, output.keep_sum);
  call.job.kind = RowKind::layer_norm;
  call.job.eps = static_cast<float>(eps);
  call.job.weight = call.vector(weight, "weight");
  call.job.bias = call.vector(bias, "bias");
  call.job.inner = Real::f32;
  call.job.real = real_of(float_dtype, "float_dtype");
  call.real = float_dtype;
  return quantized(call, x, output);
}

RowResult activation_quantized(const RowOperand& x, const std::vector<at::Tensor>& extras,
                               std::string_view epilogue, at::ScalarType float_dtype,
                               const RowOutput& output) {
  Call call(x, std::nullopt, output.keep_sum);
  Epilogue steps{};
  call.real = read_steps(epilogue, extras, x.values.sizes(), call.real, steps, call.kept);
  TORCH_CHECK(call.real == float_dtype, "the epilogue gives ", call.real, ", not ",
              float_dtype);
  call.job.steps = steps.steps;
  std::copy_n(steps.step, kMaxSteps, call.job.step);
  std::copy_n(steps.extra, kMaxExtras, call.job.extra);
  return quantized(call, x, output);
}

}  // namespace qfuse
