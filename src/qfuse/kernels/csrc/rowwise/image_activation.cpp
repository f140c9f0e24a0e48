#include "rowwise/image_activation.h"

#include <algorithm>

#include "convolution/image_rows.h"
#include "isa/select.h"
#include "kernel_api.h"
#include "linear/grain.h"
#include "linear/int8_operands.h"
#include "linear/operands.h"
#include "parallel.h"
#include "quantized/stored.h"
#include "tensors.h"

namespace qfuse {
namespace {

// Values of a strip of pixels: its results stay in the L2 cache while parts are read one by one.
constexpr int64_t kStripValues = 32768;
constexpr int64_t kValuesPerCycle = 2;

const void* moved(const void* from, int64_t bytes) {
  return static_cast<const char*>(from) + bytes;
}

// The rows of an extra after broadcasting, one per pixel of an image; `ld` is 0 if it has one value
// for the pixels of an image and channel.
struct ImageExtra {
  at::Tensor tensor;  // keeps the memory alive
  ElementRows rows;
  int64_t image;  // distance of images, in elements
};

ImageExtra extra_of(const at::Tensor& extra, const JoinedImages& images) {
  TORCH_CHECK(extra.dim() >= 1, "an extra must have at least one axis");
  std::vector<int64_t> shape = images.shape;
  const auto spatial = static_cast<int64_t>(shape.size()) - 2;
  // The common case, without the cost of views.
  if (extra.dim() == spatial + 1 && extra.size(0) == shape[1] && extra.numel() == shape[1] &&
      extra.is_contiguous()) {
    const Element type = element_of(extra.scalar_type(), "an extra");
    return {extra, {extra.const_data_ptr(), 0, type}, 0};
  }
  const at::Tensor whole = extra.expand(shape);
  const int64_t lead = extra.dim() - spatial;
  const auto sizes = extra.sizes().slice(std::max<int64_t>(lead, 0));
  const Element type = element_of(extra.scalar_type(), "an extra");
  if (std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size == 1; })) {
    at::Tensor one = whole;
    for (int64_t axis = 2; axis < whole.dim(); ++axis) one = one.narrow(axis, 0, 1);
    const bool each = extra.dim() == whole.dim() && extra.size(0) > 1;
    const at::Tensor rows = (each ? one : one.narrow(0, 0, 1)).flatten(1).contiguous();
    return {rows, {rows.const_data_ptr(), 0, type}, each ? rows.size(1) : 0};
  }
  const at::Tensor rows = whole.contiguous(images.format);
  return {rows, {rows.const_data_ptr(), shape[1], type}, rows.numel() / std::max<int64_t>(shape[0], 1)};
}

class Call {
 public:
  Call(const ImageActivation& a, const Output& output, at::ScalarType out_dtype)
      : images_(a.parts), path_(path_for(images_.shape[0])) {
    const at::ScalarType type = a.parts[0].scalar_type();
    stored_ = type == at::kChar || type == at::kByte;
    TORCH_CHECK(stored_ || type == at::kFloat, "images must be int8, uint8 or float32, not ", type);
    TORCH_CHECK(stored_ == a.scale.has_value() && (stored_ || !a.zero_point), "images of ", type,
                ": 8-bit values need a scale, floats have neither scale nor zero point");
    const at::ScalarType real = parse_steps(a.epilogue, a.extras, at::kFloat, epilogue_);
    TORCH_CHECK(real == at::kFloat, "the epilogue gives ", real, ", not float32");
    kept_.reserve(2);
    if (stored_) {
      const int64_t channels = images_.shape[1];
      scale_ = keep_floats(*a.scale, channels, "x_scale", kept_);
      const at::Tensor zero = a.zero_point ? a.zero_point->to(at::kFloat) : filled_tensor({1}, 0, at::kFloat);
      zero_ = keep_floats(zero, channels, "x_zero_point", kept_);
    }
    epilogue_.quantizer = quantizer_of(output, out_dtype);
    fold_clamps(epilogue_);
    epilogue_.out_type = element_of(out_dtype, "out_dtype");
    result_ = images_.empty(out_dtype);
    epilogue_.out = result_.mutable_data_ptr();
    epilogue_.out_ld = images_.shape[1];
    if (result_.numel() == 0) return;
    for (const at::Tensor& extra : a.extras) extras_.push_back(extra_of(extra, images_));
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  at::Tensor run() {
    if (result_.numel() == 0) return result_;
    rows_ = images_.rows();
    const int64_t channels = images_.shape[1];
    pixels_ = result_.numel() / (channels * images_.shape[0]);
    const int64_t strip = std::max<int64_t>(kStripValues / channels, 1);
    const int64_t strips = (pixels_ + strip - 1) / strip;
    const int64_t grain = grain_of_cycles(strip * channels / kValuesPerCycle + 1);
    parallel_for(0, images_.shape[0] * strips, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % strips * strip;
        write(i / strips, first, std::min(strip, pixels_ - first));
      }
    });
    return result_;
  }

 private:
  // Writes `count` pixels of an image from `first` on.
  void write(int64_t image, int64_t first, int64_t count) const {
    Epilogue epilogue = epilogue_;
    const int64_t pixel = image * pixels_ + first;
    for (const ImageRows& part : rows_) {
      const Element type = element_of(part.tensor.scalar_type(), "an image");
      epilogue.out = static_cast<int8_t*>(epilogue_.out) + pixel * epilogue_.out_ld + part.offset;
      for (size_t i = 0; i < extras_.size(); ++i) {
        const auto& [tensor, rows, distance] = extras_[i];
        const int64_t at = image * distance + first * rows.ld + part.offset;
        epilogue.extra[i] = {moved(rows.data, at * bytes_of(rows.type)), rows.ld, rows.type};
      }
      const float* scale = stored_ ? scale_ + part.offset : nullptr;
      const float* zero = stored_ ? zero_ + part.offset : nullptr;
      path_.rows->requantize(
          {{part.row(pixel), part.ld, type}, part.channels, scale, zero, &epilogue}, count);
    }
  }

  const JoinedImages images_;
  const Path& path_;
  bool stored_ = false;
  Epilogue epilogue_{};
  const float* scale_ = nullptr;
  const float* zero_ = nullptr;
  std::vector<at::Tensor> kept_;
  std::vector<ImageExtra> extras_;
  std::vector<ImageRows> rows_;
  at::Tensor result_;
  int64_t pixels_ = 0;
};

}  // namespace

at::Tensor image_activation_quantized(const ImageActivation& a, const Output& output,
                                      at::ScalarType out_dtype) {
  return Call(a, output, out_dtype).run();
}

}  // namespace qfuse
