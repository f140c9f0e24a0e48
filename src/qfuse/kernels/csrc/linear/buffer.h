// Scratch memory of one thread.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace qfuse {

// Uninitialized memory, aligned to cache lines.
class Buffer {
 public:
  explicit Buffer(int64_t bytes)
      : memory_(
            std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment)) {
    TORCH_CHECK(memory_, "out of memory: ", bytes, " bytes");
  }
  void* get() const { return memory_.get(); }
  template <class Element>
  Element* as() const {
    return static_cast<Element*>(memory_.get());
  }

 private:
  static constexpr int64_t kAlignment = 64;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
};

}  // namespace qfuse
