#include "linear/int8_operands.h"

#include <c10/core/ScalarType.h>

#include <cstring>

#include "linear/operands.h"

namespace qfuse {

void check_int8(const Int8Operands& o, int64_t k) {
  TORCH_CHECK(o.x.scalar_type() == at::kChar || o.x.scalar_type() == at::kByte,
              "x must be int8 or uint8, not ", o.x.scalar_type());
  const int64_t most = max_depth(o.w_zero_point.has_value());
  TORCH_CHECK(k <= most, "K is ", k, "; int32 sums are exact up to ", most);
}

uint32_t flip_of(const at::Tensor& x) { return x.scalar_type() == at::kChar ? kSignBits : 0u; }

void copy_flipped(const uint8_t* from, int64_t count, uint32_t flip, uint8_t* to) {
  const uint64_t flips = uint64_t{flip} << 32 | flip;
  int64_t k = 0;
  for (; k + 8 <= count; k += 8) {
    uint64_t eight;
    std::memcpy(&eight, from + k, sizeof(eight));
    eight ^= flips;
    std::memcpy(to + k, &eight, sizeof(eight));
  }
  for (; k < count; ++k) to[k] = from[k] ^ static_cast<uint8_t>(flip);
}

int32_t shift_of(uint32_t flip, const Path& path) { return flip && path.keeps_sign ? 128 : 0; }

void read_features(const Int8Operands& o, int64_t n, Epilogue& epilogue,
                   std::vector<at::Tensor>& kept) {
  set_product(epilogue, o.product_dtype);
  epilogue.w_scale = keep_floats(o.w_scale, n, "w_scale", kept);
  epilogue.w_sums = o.w_sums.const_data_ptr<int32_t>();
  if (o.bias) epilogue.bias = keep_floats(*o.bias, n, "bias", kept);
  if (!o.w_zero_point) return;
  kept.push_back(vector_of(*o.w_zero_point, at::kInt, n, "w_zero_point"));
  epilogue.w_zero = kept.back().const_data_ptr<int32_t>();
}

const float* keep_floats(const at::Tensor& tensor, int64_t count, const char* what,
                         std::vector<at::Tensor>& kept) {
  kept.push_back(vector_of(tensor, at::kFloat, count, what));
  return kept.back().const_data_ptr<float>();
}

void sum_rows(const uint8_t* rows, int64_t ld, int64_t count, int64_t k, uint32_t flip,
              int32_t shift, int32_t* sums) {
  const auto byte = static_cast<uint8_t>(flip);
  for (int64_t i = 0; i < count; ++i) {
    int32_t sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += static_cast<uint8_t>(rows[i * ld + j] ^ byte);
    sums[i] = sum - static_cast<int32_t>(k) * shift;
  }
}

}  // namespace qfuse
