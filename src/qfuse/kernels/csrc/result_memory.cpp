#include "result_memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <mutex>

namespace qfuse {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kPage = size_t{4} << 10;
constexpr size_t kHugePage = size_t{2} << 20;
// Smaller blocks stay in the C library's lists.
constexpr size_t kLeastKept = size_t{64} << 10;
constexpr size_t kMostKept = size_t{256} << 20;
// A sanitizer finds what is outside of a block only if the block has the size that was asked for, and
// what is used after it was freed only if it is freed.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kKeeps = false;
#else
constexpr bool kKeeps = true;
#endif

struct Block {
  void* data;
  size_t bytes;
  Block* next;
};

uintptr_t rounded_up(uintptr_t value, size_t step) { return (value + step - 1) / step * step; }

// Memory of the system that begins with a huge page: those take fewer faults, and fewer entries of the
// translation cache. The last page that is filled in part stays small.
void* map_pages(size_t bytes) {
  const size_t space = bytes + kHugePage;
  void* const area =
      mmap(nullptr, space, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (area == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<uintptr_t>(area);
  const uintptr_t data = rounded_up(begin, kHugePage);
  if (data > begin) munmap(area, data - begin);
  const uintptr_t end = data + bytes;
  if (begin + space > end) munmap(reinterpret_cast<void*>(end), begin + space - end);
  // Advice: without it, or where the system has none to give, pages are small.
  madvise(reinterpret_cast<void*>(data), bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  return reinterpret_cast<void*>(data);
}

// `bytes` is a multiple of a page.
void* new_memory(size_t bytes) {
  return bytes < kHugePage ? std::aligned_alloc(kAlignment, bytes) : map_pages(bytes);
}

void free_all(Block* blocks) {
  while (blocks) {
    Block* const block = blocks;
    blocks = block->next;
    if (block->bytes < kHugePage) {
      std::free(block->data);
    } else {
      munmap(block->data, block->bytes);
    }
    delete block;
  }
}

class KeptBlocks {
 public:
  // Returns a block of at least so many bytes, and at most about twice as many.
  Block* take(size_t bytes) {
    const size_t size = rounded_up(bytes, kPage);
    Block* surplus = nullptr;
    Block* block = nullptr;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      block = remove_best(size);
      used_bytes_ += block ? block->bytes : size;
      most_used_ = std::max(most_used_, used_bytes_);
      surplus = remove_beyond(2 * most_used_ - used_bytes_);
    }
    free_all(surplus);
    return block ? block : new_block(size);
  }

  void give(Block* block) noexcept {
    Block* surplus = nullptr;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      used_bytes_ -= block->bytes;
      kept_bytes_ += block->bytes;
      block->next = nullptr;
      *(oldest_ ? &newest_->next : &oldest_) = block;
      newest_ = block;
      surplus = remove_beyond(kMostKept);
    }
    free_all(surplus);
  }

  size_t kept_bytes() {
    const std::lock_guard<std::mutex> guard(lock_);
    return kept_bytes_;
  }

  // Frees all kept blocks, and forgets how much was in use.
  size_t release() {
    Block* surplus = nullptr;
    size_t bytes = 0;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      bytes = kept_bytes_;
      surplus = remove_beyond(0);
      most_used_ = used_bytes_;
    }
    free_all(surplus);
    return bytes;
  }

  // A child process has only the thread that forked: no other may hold the lock then.
  void lock() { lock_.lock(); }
  void unlock() { lock_.unlock(); }

 private:
  // Its bytes count as used already.
  Block* new_block(size_t bytes) {
    void* data = new_memory(bytes);
    if (!data && release() > 0) data = new_memory(bytes);
    if (!data) {
      const std::lock_guard<std::mutex> guard(lock_);
      used_bytes_ -= bytes;
      most_used_ = used_bytes_;
    }
    TORCH_CHECK(data, "out of memory: ", bytes, " bytes");
    return new Block{data, bytes, nullptr};
  }

  // Removes the smallest block of at least so many bytes, but of no more than twice as many; among
  // equals the newest, which may still be in the cache.
  Block* remove_best(size_t bytes) {
    Block* before = nullptr;
    Block* found = nullptr;
    Block* last = nullptr;
    for (Block* block = oldest_; block; last = block, block = block->next) {
      const bool fits = block->bytes >= bytes && block->bytes <= 2 * bytes;
      if (!fits || (found && block->bytes > found->bytes)) continue;
      before = last;
      found = block;
    }
    if (!found) return nullptr;
    *(before ? &before->next : &oldest_) = found->next;
    if (newest_ == found) newest_ = before;
    kept_bytes_ -= found->bytes;
    return found;
  }

  // Removes the oldest blocks until the others have at most so many bytes.
  Block* remove_beyond(size_t bytes) {
    Block* const removed = oldest_;
    Block* last = nullptr;
    for (; oldest_ && kept_bytes_ > bytes; oldest_ = oldest_->next) {
      kept_bytes_ -= oldest_->bytes;
      last = oldest_;
    }
    if (!last) return nullptr;
    last->next = nullptr;
    if (!oldest_) newest_ = nullptr;
    return removed;
  }

  std::mutex lock_;
  Block* oldest_ = nullptr;
  Block* newest_ = nullptr;
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
  auto* const block = static_cast<Block*>(context);
  c10::profiledCPUMemoryReporter().Delete(block->data);
  kept_blocks().give(block);
}

class ResultAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (!kKeeps || bytes < kLeastKept) return c10::GetCPUAllocator()->allocate(bytes);
    Block* const block = kept_blocks().take(bytes);
    c10::profiledCPUMemoryReporter().New(block->data, bytes);
    return {block->data, block, &free_result, c10::Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

c10::Allocator* result_allocator() {
  static ResultAllocator allocator;
  return &allocator;
}

int64_t result_memory() { return static_cast<int64_t>(kept_blocks().kept_bytes()); }

int64_t release_result_memory() { return static_cast<int64_t>(kept_blocks().release()); }

}  // namespace qfuse
