#include "quantized/stored.h"

#include <c10/core/ScalarType.h>

#include "linear/operands.h"
#include "tensors.h"

namespace qfuse {

int32_t least_of(at::ScalarType type) { return type == at::kChar ? -128 : 0; }

at::Tensor row_zeros(const at::Tensor& zero_point, int64_t rows, int32_t least,
                     int32_t shift, const char* what) {
  const at::Tensor given = vector_of(zero_point, at::kInt, rows, what);
  const auto* from = given.const_data_ptr<int32_t>();
  at::Tensor zeros = empty_tensor({rows}, at::kInt);
  auto* to = zeros.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < rows; ++i) {
    TORCH_CHECK(from[i] >= least && from[i] <= least + 255, what, " ", from[i],
                " is outside of the range of its values");
    to[i] = from[i] - least - shift;
  }
  return zeros;
}

int32_t only_zero(const std::optional<at::Tensor>& zero_point, int32_t least, int32_t shift,
                  const char* what) {
  if (!zero_point) return -least - shift;
  TORCH_CHECK(!at::isFloatingType(zero_point->scalar_type()), what, " must be whole numbers");
  const double zero = number_of(*zero_point, what);
  TORCH_CHECK(zero >= least && zero <= least + 255, what, " ", zero,
              " is outside of the range of its values");
  return static_cast<int32_t>(zero) - least - shift;
}

Element element_of(at::ScalarType type, const char* what) {
  if (type == at::kChar) return Element::s8;
  if (type == at::kByte) return Element::u8;
  return static_cast<Element>(real_of(type, what));
}

int64_t bytes_of(Element type) {
  if (type == Element::f32) return 4;
  return type == Element::bf16 || type == Element::f16 ? 2 : 1;
}

}  // namespace qfuse
