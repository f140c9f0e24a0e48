#include "linear/real_weight.h"

#include <c10/core/ScalarType.h>

#include <vector>

#include "linear/operands.h"
#include "tensors.h"

namespace qfuse {
namespace {

constexpr int64_t kGroupMultiple = 8;

// Parameters as [blocks, groups, 64]; those of a single group may have shape [N].
at::Tensor parameters_of(const at::Tensor& given, at::ScalarType type, const RealWeight& w,
                         const char* what) {
  const std::vector<int64_t> shape{w.blocks(), w.groups, kBlock};
  const bool wants_float = at::isFloatingType(type);
  TORCH_CHECK(wants_float ? at::isFloatingType(given.scalar_type()) : given.scalar_type() == type,
              what, " has type ", given.scalar_type(), ", expected ",
              wants_float ? "a float type" : toString(type));
  if (given.dim() == 1 && w.groups == 1) {
    TORCH_CHECK(given.numel() == w.n, what, " has ", given.numel(), " elements, expected ", w.n);
    const int64_t padding = w.blocks() * kBlock - w.n;
    const at::Tensor typed = given.to(type);
    return (padding == 0 ? typed : padded_rows(typed, padding)).contiguous();
  }
  TORCH_CHECK(given.sizes() == at::IntArrayRef(shape), what, " must be ", at::IntArrayRef(shape),
              ", or with one group [", w.n, "], not ", given.sizes());
  return given.to(type).contiguous();
}

void check_groups(const RealWeight& w, int64_t k) {
  if (w.groups == 1 && w.whole) return;
  TORCH_CHECK(w.groups >= 1 && k % w.groups == 0 && k / w.groups % kGroupMultiple == 0,
              "groups, and weights with offsets, must be of a multiple of ", kGroupMultiple,
              " input features; here ", w.groups, " groups share ", k);
}

}  // namespace

RealBlock RealWeight::block(int64_t index, int64_t word) const {
  const int64_t group = depth() / groups;
  const int64_t skipped = group > 0 ? word * codes_per_word() / group : 0;
  const int64_t first = (index * groups + skipped) * kBlock;
  const auto at = [&]<class Element>(const at::Tensor& values, const Element*) {
    return values.defined() ? static_cast<const Element*>(values.const_data_ptr()) + first
                            : nullptr;
  };
  const auto* bytes = static_cast<const uint8_t*>(codes.const_data_ptr());
  return {bytes + (index * words + word) * kBlock * kGroup,
          depth(),
          group,
          whole ? nullptr : at(scale, static_cast<const float*>(nullptr)),
          at(zero, static_cast<const int8_t*>(nullptr)),
          at(offset, static_cast<const float*>(nullptr)),
          compute,
          real};
}

Format format_of(const at::Tensor& packed, int64_t bits) {
  const at::ScalarType type = packed.scalar_type();
  if (bits == 4 && type == at::kByte) return Format::four;
  if (bits == 8 && type == at::kChar) return Format::eight;
  if (bits == 8 && type == at::kFloat8_e4m3fn) return Format::e4m3;
  if (bits == 8 && type == at::kFloat8_e5m2) return Format::e5m2;
  if (bits == 16 && type == at::kHalf) return Format::half;
  TORCH_CHECK(false, "w_packed of ", bits, " bits cannot have type ", type);
}

const CodeKernels& kernels_for(const Path& path, Format format) {
  switch (format) {
    case Format::four:
      return path.real->four;
    case Format::eight:
      return path.real->eight;
    case Format::e4m3:
      return path.real->e4m3;
    case Format::e5m2:
      return path.real->e5m2;
    default:
      return path.real->half;
  }
}

RealWeight real_weight_of(const RealWeightArguments& a, Format format, int64_t n, int64_t k,
                          int64_t words, at::ScalarType real) {
  TORCH_CHECK(n >= 0, "out_features is ", n);
  const int64_t groups = a.scale.dim() == 3 ? a.scale.size(1) : 1;
  RealWeight w{format,   n,  words, groups, groups == 1 && !a.offset, real_of(a.compute, "compute"),
               real_of(real, "x"), a.packed, {}, {}, {}};
  const bool is_float = format != Format::four && format != Format::eight;
  const at::ScalarType stored = format == Format::four ? at::kByte : at::kChar;
  const int64_t values = format == Format::half ? 2 : kGroup;
  TORCH_CHECK(a.packed.is_contiguous() &&
                  a.packed.sizes() == at::IntArrayRef({w.blocks(), words, kBlock, values}),
              "w_packed must be contiguous [ceil(N / 64), ", words, ", 64, ", values,
              "] with N = ", n, " for K = ", k, ", not ", a.packed.scalar_type(), " ",
              a.packed.sizes());
  TORCH_CHECK(!is_float || (!a.zero_point && !a.offset), "weights of type ",
              a.packed.scalar_type(), " have neither zero points nor offsets");
  TORCH_CHECK(format != Format::half || real == at::kFloat,
              "weights of float16 multiply activations of float32, not ", real);
  check_groups(w, k);
  w.scale = parameters_of(a.scale, at::kFloat, w, "w_scale");
  if (a.zero_point) w.zero = parameters_of(*a.zero_point, stored, w, "w_zero_point");
  if (a.offset) w.offset = parameters_of(*a.offset, at::kFloat, w, "w_offset");
  return w;
}

at::ScalarType scalar_type(Real type) { return type == Real::bf16 ? at::kBFloat16 : at::kFloat; }

}  // namespace qfuse
