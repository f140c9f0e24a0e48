// Scratch memory of one thread.
#pragma once

#include <c10/util/Exception.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>

namespace qfuse {

// Memory of one thread that its next calls use again: returning large blocks to the allocator, and
// getting them back, takes a large part of a small call.
class KeptMemory {
 public:
  struct Block {
    void* data = nullptr;
    int64_t bytes = 0;
  };

  static KeptMemory& of_this_thread() {
    static thread_local KeptMemory kept;
    return kept;
  }

  KeptMemory() = default;
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;
  ~KeptMemory() {
    for (const Block& block : blocks_) std::free(block.data);
  }

  // Returns the smallest block of at least so many bytes.
  Block take(int64_t bytes) {
    Block* found = nullptr;
    for (Block& block : blocks_) {
      const bool fits = block.data && block.bytes >= bytes;
      if (fits && (!found || block.bytes < found->bytes)) found = &block;
    }
    if (found) return std::exchange(*found, Block{});
    const int64_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* data = std::aligned_alloc(kAlignment, size);
    TORCH_CHECK(data, "out of memory: ", bytes, " bytes");
    return {data, size};
  }

  void give(Block block) {
    if (block.bytes <= kMostBytes) {
      // The smallest one makes place.
      for (Block& kept : blocks_) {
        if (kept.bytes < block.bytes) std::swap(kept, block);
      }
    }
    std::free(block.data);
  }

 private:
  static constexpr int64_t kAlignment = 64;
  // A sanitizer finds what is outside of a block only if the block has the size that was asked for.
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int64_t kMostBytes = -1;
#else
  static constexpr int64_t kMostBytes = 320 << 10;
#endif

  std::array<Block, 8> blocks_;
};

// Uninitialized memory, aligned to cache lines.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) : block_(KeptMemory::of_this_thread().take(bytes)) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { KeptMemory::of_this_thread().give(block_); }

  void* get() const { return block_.data; }
  template <class Element>
  Element* as() const {
    return static_cast<Element*>(block_.data);
  }

 private:
  const KeptMemory::Block block_;
};

}  // namespace qfuse
