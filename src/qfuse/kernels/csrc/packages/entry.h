// What `run_package` runs: one package, or a chain of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace qfuse {

// A number of places, each of which one thread may hold.
class Places {
 public:
  explicit Places(int64_t count) : free_(count) {
    TORCH_CHECK(count >= 1, "a package needs at least one runner, not ", count);
  }

  void take() {
    std::unique_lock lock(mutex_);
    freed_.wait(lock, [&] { return free_ > 0; });
    --free_;
  }

  void give() {
    {
      const std::lock_guard lock(mutex_);
      ++free_;
    }
    freed_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable freed_;
  int64_t free_;
};

// A place that is held until the end of a scope.
class HeldPlace {
 public:
  explicit HeldPlace(Places& places) : places_(places) { places_.take(); }
  ~HeldPlace() { places_.give(); }
  HeldPlace(const HeldPlace&) = delete;
  HeldPlace& operator=(const HeldPlace&) = delete;

 private:
  Places& places_;
};

// Something with a number that a call names: to pass a number takes 0.1 us, an object 10.
class Entry {
 public:
  Entry() : number_(all().add(this)) {}
  virtual ~Entry() { all().remove(number_); }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  int64_t number() const { return number_; }

  virtual std::vector<at::Tensor> run(at::TensorList inputs) = 0;

  // The entry of a number; the caller keeps it alive.
  static Entry& of(int64_t number) { return all().at(number); }

 private:
  // All entries that exist.
  class Registry {
   public:
    int64_t add(Entry* entry) {
      const std::lock_guard lock(mutex_);
      entries_.emplace(++last_, entry);
      return last_;
    }

    void remove(int64_t number) {
      const std::lock_guard lock(mutex_);
      entries_.erase(number);
    }

    Entry& at(int64_t number) {
      const std::lock_guard lock(mutex_);
      const auto found = entries_.find(number);
      TORCH_CHECK(found != entries_.end(), "there is no package with the number ", number);
      return *found->second;
    }

   private:
    std::mutex mutex_;
    std::unordered_map<int64_t, Entry*> entries_;
    int64_t last_ = 0;
  };

  static Registry& all() {
    // Never destroyed: objects may outlive static variables.
    static auto* const registry = new Registry;
    return *registry;
  }

  const int64_t number_;
};

}  // namespace qfuse
