// From tensors to the plain structures of kernel_api.h, with every argument checked.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

#include "kernel_api.h"

namespace qfuse {

// A tensor [..., columns] as rows at a fixed distance. Strides of axes of size 1 mean nothing
// (torch calls such a tensor contiguous whatever they are), so they are never taken for the
// distance.
struct Rows {
  at::Tensor tensor;  // keeps the memory alive
  int64_t rows;
  int64_t columns;
  int64_t ld;  // in elements
};

// Makes a copy only where the rows of `tensor` are not at a fixed distance with adjacent elements.
Rows rows_of(const at::Tensor& tensor);

// The kernel's name of a float type. Throws for other types; `what` is the argument's name.
Real real_of(at::ScalarType type, const char* what);

// A vector of `size` float32 or int32; one element is repeated. Copies only where it has to.
at::Tensor vector_of(const at::Tensor& tensor, at::ScalarType type, int64_t size, const char* what);

// The only element of `tensor`.
double number_of(const at::Tensor& tensor, const char* what);

// Reads the text of an epilogue, which src/qfuse/kernels/ops.py explains, into `epilogue`, and
// `extras`, broadcast to `shape`, or where halves have been told apart to half of its last axis.
// Every step rounds to the type that torch's promotion gives it. Returns the type behind the last
// step; `kept` keeps the extras' memory alive. Throws for halves unless the caller multiplies them.
at::ScalarType read_steps(std::string_view text, const std::vector<at::Tensor>& extras,
                          at::IntArrayRef shape, at::ScalarType real, Epilogue& epilogue,
                          std::vector<at::Tensor>& kept, bool takes_halves = false);

}  // namespace qfuse
