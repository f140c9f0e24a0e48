// Memory of results and temporary tensors, which is used again. See Buffer for the scratch memory of a
// thread.
#pragma once

#include <c10/core/Allocator.h>

namespace qfuse {

// An allocator that keeps large blocks which were freed, for tensors of about their size. The C library
// returns such blocks to the system, so that every call of a model faults in its pages again. What it
// holds is at most twice the largest amount that was in use at one time. Thread-safe.
c10::Allocator* result_allocator();

// How many bytes it holds that no tensor uses.
int64_t result_memory();

// Frees them; returns how many there were.
int64_t release_result_memory();

}  // namespace qfuse
