#include "matmul/extras.h"

#include "matmul/batches.h"
#include "quantized/stored.h"

namespace qfuse {

BatchedExtra batched_extra(const at::Tensor& extra, at::IntArrayRef shape, std::vector<at::Tensor>& kept) {
  TORCH_CHECK(extra.dim() >= 1, "an extra must have at least one axis");
  TORCH_CHECK(broadcasts_to(extra.sizes(), shape), "an extra of shape ", extra.sizes(),
              " does not broadcast to ", shape);
  at::Tensor rows = extra.dim() == 1 ? extra.unsqueeze(0) : extra;
  const int64_t columns = shape.back();
  // Elements of a row have to be adjacent; other axes are broadcast in place.
  if (rows.size(-1) != columns) {
    std::vector<int64_t> sizes = rows.sizes().vec();
    sizes.back() = columns;
    rows = rows.expand(sizes).contiguous();
  } else if (columns > 1 && rows.stride(-1) != 1) {
    rows = rows.contiguous();
  }
  kept.push_back(rows);
  const auto lead = rows.dim() - 2;
  const int64_t ld = rows.size(-2) == 1 ? 0 : rows.stride(-2);
  return {{rows.const_data_ptr(), ld, element_of(rows.scalar_type(), "an extra")},
          offsets_of(shape.slice(0, shape.size() - 2), rows.sizes().slice(0, lead),
                     rows.strides().slice(0, lead))};
}

}  // namespace qfuse
