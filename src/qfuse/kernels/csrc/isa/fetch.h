// Fetches what is read next while products are computed.
#pragma once

#include "isa/vec.h"

namespace {

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
