#include "select.h"

#include <ATen/native/CPUBlas.h>
#include <c10/core/ScalarType.h>

#include <atomic>

namespace qfuse {
namespace {

std::atomic<const Path*> forced{nullptr};

std::vector<const Path*> usable_paths() {
  std::vector<const Path*> paths{&portable_path()};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    paths.push_back(&avx2_path());
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    paths.push_back(&brgemm_path());
    paths.push_back(&avx512_vnni_path());
    // True only where oneDNN will use AMX for int8.
    if (at::native::cpublas::could_pack(at::kChar))
      std::swap(paths.back(), paths[paths.size() - 2]);
  }
#endif
  return paths;
}

// Computed once: facts of the processor.
const std::vector<const Path*>& usable() {
  static const std::vector<const Path*> paths = usable_paths();
  return paths;
}

}  // namespace

const Path& path_for(int64_t rows) {
  if (const Path* path = forced.load(std::memory_order_relaxed)) return *path;
#if defined(__x86_64__)
  const Path& best = *usable().back();
  // A stream of weights is bound by memory, which AMX does not speed up; setting it up costs.
  return rows <= kStreamRows && &best == &brgemm_path() ? avx512_vnni_path() : best;
#else
  return *usable().back();
#endif
}

std::vector<std::string> path_names() {
  std::vector<std::string> names;
  for (const Path* path : usable()) names.emplace_back(path->name);
  return names;
}

bool choose_path(std::string_view name) {
  if (name.empty()) {
    forced = nullptr;
    return true;
  }
  for (const Path* path : usable()) {
    if (name == path->name) {
      forced = path;
      return true;
    }
  }
  return false;
}

std::string chosen_path() {
  const Path* path = forced.load();
  return path ? path->name : "";
}

}  // namespace qfuse
