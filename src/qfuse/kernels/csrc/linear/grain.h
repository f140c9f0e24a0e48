// How finely work is split between threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace qfuse {

// Minimum work per thread (about 2 us); starting a team costs about as much.
constexpr int64_t kLeastCycles = 8000;
constexpr int64_t kLeastBytes = 32768;

// How many pieces of so many cycles, or of so many bytes, a thread takes at least.
inline int64_t grain_of_cycles(int64_t cycles) { return kLeastCycles / cycles + 1; }
inline int64_t grain_of_bytes(int64_t bytes) { return kLeastBytes / std::max<int64_t>(bytes, 1) + 1; }

}  // namespace qfuse
