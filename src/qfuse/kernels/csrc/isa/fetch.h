// Fetches what is read next while products are computed.
#pragma once

#include "isa/vec.h"

namespace {

// Fetches the lines of the caches that hold some bytes; `from` may be any address.
template <int64_t Bytes>
QFUSE_INLINE void fetch_lines(const void* from) {
  static_assert(Bytes > 0);
  constexpr int kLines = (Bytes + qfuse::kLine - 1) / qfuse::kLine;
  Unrolled<kLines>::run([&]<int I>() QFUSE_LAMBDA {
    __builtin_prefetch(static_cast<const char*>(from) + I * qfuse::kLine);
  });
}

// Fetches weights of a stream, as many as are read at `from` now.
template <int64_t Bytes>
QFUSE_INLINE void fetch_weights(const void* from) {
  constexpr int64_t kAhead = 8192;
  fetch_lines<Bytes>(static_cast<const char*>(from) + kAhead);
}

// Fetches parameters of a block's features for a later group. Each is a short run in memory, and
// the weights of a group are read between two of them: a Zen 5 was seen to wait for them.
template <class T>
QFUSE_INLINE void fetch_parameters(const T* of_group) {
  constexpr int64_t kGroupsAhead = 16;
  fetch_lines<qfuse::kBlock * sizeof(T)>(of_group + kGroupsAhead * qfuse::kBlock);
}

// See qfuse::Following. Its state stays in registers until it is destroyed.
class Fetcher {
 public:
  QFUSE_INLINE explicit Fetcher(qfuse::Following* memory)
      : memory_(memory),
        next_(memory ? memory->begin : nullptr),
        end_(memory ? memory->end : nullptr) {}

  Fetcher(const Fetcher&) = delete;
  Fetcher& operator=(const Fetcher&) = delete;

  QFUSE_INLINE ~Fetcher() {
    if (memory_) memory_->begin = next_;
  }

  QFUSE_INLINE void step() {
    if (next_ >= end_) return;
    __builtin_prefetch(next_, 0, 2);
    next_ += qfuse::kLine;
  }

 private:
  qfuse::Following* memory_;
  const char* next_;
  const char* end_;
};

}  // namespace
