#include "convolution/cat_channels.h"

#include <algorithm>
#include <cstring>

#include "convolution/image_rows.h"
#include "linear/grain.h"
#include "parallel.h"

namespace qfuse {
namespace {

// Pixels that are copied of one image after the other: their results stay in the L1 cache.
constexpr int64_t kStrip = 32;

template <int64_t Bytes>
void copy_of(const char* from, int64_t from_ld, char* to, int64_t to_ld, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * to_ld, from + i * from_ld, Bytes);
}

void copy(const ImageRows& part, int64_t row, int64_t rows, char* to, int64_t ld) {
  const char* from = part.row(row);
  to += row * ld + part.offset;
  switch (part.channels) {
    case 16:
      return copy_of<16>(from, part.ld, to, ld, rows);
    case 32:
      return copy_of<32>(from, part.ld, to, ld, rows);
    case 64:
      return copy_of<64>(from, part.ld, to, ld, rows);
    default:
      for (int64_t i = 0; i < rows; ++i) {
        std::memcpy(to + i * ld, from + i * part.ld, part.channels);
      }
  }
}

}  // namespace

at::Tensor cat_channels(const std::vector<at::Tensor>& parts) {
  const JoinedImages images(parts);
  const at::ScalarType type = parts[0].scalar_type();
  TORCH_CHECK(type == at::kChar || type == at::kByte, "images must be int8 or uint8, not ", type);
  const at::Tensor result = images.empty(type);
  if (result.numel() == 0) return result;
  const int64_t ld = images.shape[1];
  const std::vector<ImageRows> rows = images.rows();
  auto* to = static_cast<char*>(result.mutable_data_ptr());
  parallel_for(0, result.numel() / ld, grain_of_bytes(ld), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row += kStrip) {
      for (const ImageRows& part : rows) copy(part, row, std::min(kStrip, end - row), to, ld);
    }
  });
  return result;
}

}  // namespace qfuse
