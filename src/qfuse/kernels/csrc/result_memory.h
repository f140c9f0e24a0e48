// Memory of results, which is used again.
#pragma once

#include <c10/core/Allocator.h>

namespace qfuse {

// An allocator that keeps large blocks which were freed, for results of about their size. The C
// library returns such blocks to the system, so that every call of a model faults in its pages again.
// What it holds is at most twice what was in use at once. Thread-safe.
c10::Allocator* result_allocator();

}  // namespace qfuse
