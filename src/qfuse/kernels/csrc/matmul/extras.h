// Operands of the epilogue of a product of two activations.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "kernel_api.h"

namespace qfuse {

// Where the rows of an operand of the epilogue are in each batch entry.
struct BatchedExtra {
  ElementRows rows;
  std::vector<int64_t> offsets;  // in elements
};

// Reads an operand that broadcasts to `shape`, [*batch, M, N]; `kept` keeps its memory alive.
BatchedExtra batched_extra(const at::Tensor& extra, at::IntArrayRef shape, std::vector<at::Tensor>& kept);

}  // namespace qfuse
