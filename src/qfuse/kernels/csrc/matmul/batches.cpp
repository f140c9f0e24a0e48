#include "matmul/batches.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace qfuse {

std::vector<int64_t> batch_of(const at::Tensor& tensor) {
  return tensor.sizes().slice(0, tensor.dim() - 2).vec();
}

std::vector<int64_t> shape_of(std::vector<int64_t> batch, int64_t rows, int64_t columns) {
  batch.push_back(rows);
  batch.push_back(columns);
  return batch;
}

std::vector<int64_t> broadcast_batch(at::IntArrayRef x, at::IntArrayRef other) {
  const at::IntArrayRef a = x.slice(0, x.size() - 2), b = other.slice(0, other.size() - 2);
  const size_t rank = std::max(a.size(), b.size());
  std::vector<int64_t> batch(rank, 1);
  for (size_t i = 1; i <= rank; ++i) {
    const int64_t left = i <= a.size() ? a[a.size() - i] : 1;
    const int64_t right = i <= b.size() ? b[b.size() - i] : 1;
    TORCH_CHECK(left == right || left == 1 || right == 1, "the batch axes of ", x, " and ", other,
                " do not broadcast");
    batch[rank - i] = left == 1 ? right : left;
  }
  return batch;
}

bool broadcasts_to(at::IntArrayRef from, at::IntArrayRef to) {
  if (from.size() > to.size()) return false;
  const at::IntArrayRef last = to.slice(to.size() - from.size());
  return std::equal(from.begin(), from.end(), last.begin(),
                    [](int64_t own, int64_t wanted) { return own == wanted || own == 1; });
}

std::vector<int64_t> offsets_of(at::IntArrayRef batch, at::IntArrayRef sizes,
                                at::IntArrayRef strides) {
  std::vector<int64_t> offsets{0};
  const size_t missing = batch.size() - sizes.size();
  for (size_t axis = 0; axis < batch.size(); ++axis) {
    const bool repeated = axis < missing || sizes[axis - missing] == 1;
    const int64_t step = repeated ? 0 : strides[axis - missing];
    std::vector<int64_t> next;
    next.reserve(offsets.size() * batch[axis]);
    for (const int64_t offset : offsets) {
      for (int64_t i = 0; i < batch[axis]; ++i) next.push_back(offset + i * step);
    }
    offsets = std::move(next);
  }
  return offsets;
}

std::vector<int64_t> contiguous_strides(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step *= sizes[i];
  }
  return strides;
}

}  // namespace qfuse
