// Fetches what is read next while products are computed.
#pragma once

#include "isa/vec.h"

namespace {

// How far ahead of what is read weights are fetched that come from memory once, in bytes.
constexpr int64_t kAhead = 8192;

template <int64_t Bytes>
QFUSE_INLINE void fetch_lines(const void* from) {
  Unrolled<Bytes / qfuse::kLine>::run([&]<int I>() QFUSE_LAMBDA {
    __builtin_prefetch(static_cast<const char*>(from) + I * qfuse::kLine);
  });
}

// Fetches parameters of 64 features for a later group. Processors do not fetch them ahead: they are
// read in short runs, with the weights of a group between them.
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
