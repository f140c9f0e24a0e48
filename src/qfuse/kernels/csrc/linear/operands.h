// Converts tensors to the plain structures of kernel_api.h, and checks every argument.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

#include "kernel_api.h"

namespace qfuse {

// A tensor [..., columns] as rows at a fixed distance. Strides of axes of size 1 are arbitrary
// (torch calls such a tensor contiguous for any of them), so they are never used as the distance.
struct Rows {
  at::Tensor tensor;  // keeps the memory alive
  int64_t rows;
  int64_t columns;
  int64_t ld;  // in elements
};

// Copies only if the rows of `tensor` are not at a fixed distance with adjacent elements.
Rows rows_of(const at::Tensor& tensor);

// The kernel's name of a float type. Throws for other types; `what` is the argument's name.
Real real_of(at::ScalarType type, const char* what);

// A vector of `size` float32 or int32; a single element is repeated. Copies only if necessary.
at::Tensor vector_of(const at::Tensor& tensor, at::ScalarType type, int64_t size, const char* what);

// The only element of `tensor`.
double number_of(const at::Tensor& tensor, const char* what);

// Parses the text of an epilogue (see src/qfuse/kernels/ops.py) into `epilogue`. Every op rounds to
// the type of torch's type promotion. Returns the type after the last op. Throws for a GLU. Where
// the extras lie in memory is left to the caller.
at::ScalarType parse_steps(std::string_view text, const std::vector<at::Tensor>& extras,
                           at::ScalarType real, Epilogue& epilogue);

// The same with `extras` broadcast to `shape`, or within a GLU to half of its last axis. `kept`
// keeps the extras' memory alive. Throws for a GLU unless the caller supports it.
at::ScalarType read_steps(std::string_view text, const std::vector<at::Tensor>& extras,
                          at::IntArrayRef shape, at::ScalarType real, Epilogue& epilogue,
                          std::vector<at::Tensor>& kept, bool takes_halves = false);

// Sets the type of the product of integers after the steps were read. A cast of a float32 product
// that is the first step becomes its type: both round once, and products are written sooner.
void set_product(Epilogue& epilogue, at::ScalarType product_dtype);

// Fetches what an epilogue writes of some rows of a block, for the stores.
void prefetch_result(const Epilogue& epilogue, int64_t row, int64_t rows, int64_t column,
                     int64_t columns);

}  // namespace qfuse
