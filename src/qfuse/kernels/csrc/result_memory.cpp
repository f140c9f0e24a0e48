#include "result_memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <vector>

namespace qfuse {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kPage = size_t{4} << 10;
constexpr size_t kHugePage = size_t{2} << 20;
// Smaller blocks stay in the C library's lists.
constexpr size_t kLeastKept = size_t{64} << 10;
// A sanitizer finds what is outside of a block only if the block has the size that was asked for, and
// what is used after it was freed only if it is freed.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kMostKept = 0;
#else
constexpr size_t kMostKept = size_t{256} << 20;
#endif

struct Block {
  void* data;
  size_t bytes;
};

size_t rounded_up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

void* aligned(size_t alignment, size_t bytes) {
  void* data = std::aligned_alloc(alignment, rounded_up(bytes, alignment));
  TORCH_CHECK(data, "out of memory: ", bytes, " bytes");
  return data;
}

// A new block. Huge pages take fewer faults, and fewer entries of the translation cache; a page that
// the block fills in part only stays small.
Block new_block(size_t bytes) {
  if (bytes < kHugePage) return {aligned(kAlignment, bytes), bytes};
  void* data = aligned(kHugePage, bytes);
  // Advice: without it, or where the system has none to give, pages are small.
  madvise(data, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  return {data, bytes};
}

// Freed blocks, in the order in which they were freed.
class KeptBlocks {
 public:
  Block take(size_t bytes) {
    const size_t size = bytes < kLeastKept ? bytes : rounded_up(bytes, kPage);
    if (size < kLeastKept || kMostKept == 0) return {aligned(kAlignment, size), size};
    std::vector<Block> surplus;
    Block block{nullptr, size};
    {
      const std::lock_guard<std::mutex> guard(lock_);
      const auto found = best(size);
      if (found != kept_.end()) {
        block = *found;
        kept_.erase(found);
        kept_bytes_ -= block.bytes;
      }
      used_bytes_ += block.bytes;
      most_used_ = std::max(most_used_, used_bytes_);
      surplus = beyond(2 * most_used_ - used_bytes_);
    }
    for (const Block& other : surplus) std::free(other.data);
    return block.data ? block : new_block(size);
  }

  void give(Block block) {
    std::vector<Block> surplus{block};
    if (block.bytes >= kLeastKept && kMostKept > 0) {
      const std::lock_guard<std::mutex> guard(lock_);
      used_bytes_ -= block.bytes;
      kept_.push_back(block);
      kept_bytes_ += block.bytes;
      surplus = beyond(kMostKept);
    }
    for (const Block& other : surplus) std::free(other.data);
  }

  size_t kept_bytes() {
    const std::lock_guard<std::mutex> guard(lock_);
    return kept_bytes_;
  }

  // Frees all kept blocks, and forgets how much was in use.
  size_t release() {
    std::vector<Block> surplus;
    size_t bytes = 0;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      bytes = kept_bytes_;
      surplus = beyond(0);
      most_used_ = used_bytes_;
    }
    for (const Block& other : surplus) std::free(other.data);
    return bytes;
  }

  // A child process has only the thread that forked: no other may hold the lock then.
  void lock() { lock_.lock(); }
  void unlock() { lock_.unlock(); }

 private:
  // The smallest block of at least so many bytes, but not of more than twice as many.
  std::vector<Block>::iterator best(size_t bytes) {
    auto found = kept_.end();
    for (auto block = kept_.begin(); block != kept_.end(); ++block) {
      const bool fits = block->bytes >= bytes && block->bytes <= 2 * bytes;
      if (fits && (found == kept_.end() || block->bytes <= found->bytes)) found = block;
    }
    return found;
  }

  // Removes the oldest blocks until the others have at most so many bytes.
  std::vector<Block> beyond(size_t bytes) {
    auto last = kept_.begin();
    for (; last != kept_.end() && kept_bytes_ > bytes; ++last) kept_bytes_ -= last->bytes;
    std::vector<Block> removed(kept_.begin(), last);
    kept_.erase(kept_.begin(), last);
    return removed;
  }

  std::mutex lock_;
  std::vector<Block> kept_;
  size_t kept_bytes_ = 0;
  size_t used_bytes_ = 0;
  size_t most_used_ = 0;
};

// Never destroyed: results may be freed while the process ends.
KeptBlocks& kept_blocks() {
  static auto* const blocks = [] {
    const auto lock = [] { kept_blocks().lock(); };
    const auto unlock = [] { kept_blocks().unlock(); };
    pthread_atfork(lock, unlock, unlock);
    return new KeptBlocks;
  }();
  return *blocks;
}

void free_result(void* context) {
  const auto* block = static_cast<Block*>(context);
  c10::profiledCPUMemoryReporter().Delete(block->data);
  kept_blocks().give(*block);
  delete block;
}

class ResultAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &free_nothing, cpu};
    auto* block = new Block(kept_blocks().take(bytes));
    c10::profiledCPUMemoryReporter().New(block->data, bytes);
    return {block->data, block, &free_result, cpu};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void free_nothing(void*) {}
};

}  // namespace

c10::Allocator* result_allocator() {
  static ResultAllocator allocator;
  return &allocator;
}

int64_t result_memory() { return static_cast<int64_t>(kept_blocks().kept_bytes()); }

int64_t release_result_memory() { return static_cast<int64_t>(kept_blocks().release()); }

}  // namespace qfuse
