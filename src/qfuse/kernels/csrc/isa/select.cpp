#include "isa/select.h"

#include <ATen/native/CPUBlas.h>
#include <c10/core/ScalarType.h>

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace qfuse {
namespace {

std::atomic<const Path*> forced{nullptr};

#if defined(__x86_64__)
// Compilers that are older than the instructions do not know their name.
bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

// The best one last.
void add_x86_paths(std::vector<const Path*>& paths) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return;
  paths.push_back(&avx2_path());
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
  if (has_avx_vnni()) {
    paths.push_back(&avx_vnni_path());
  } else if (has_vnni) {
    paths.push_back(&avx_vnni_evex_path());
  }
  if (has_avx512) paths.push_back(&avx512_path());
  if (!has_vnni) return;
  if (brgemm_runs()) paths.push_back(&brgemm_path());
  paths.push_back(&avx512_vnni_path());
  // True only if oneDNN will use AMX for int8.
  if (brgemm_runs() && at::native::cpublas::could_pack(at::kChar)) {
    std::swap(paths.back(), paths[paths.size() - 2]);
  }
}
#endif

std::vector<const Path*> usable_paths() {
  std::vector<const Path*> paths{&portable_path()};
#if defined(__x86_64__)
  add_x86_paths(paths);
#endif
  return paths;
}

// Computed once, since the processor does not change.
const std::vector<const Path*>& usable() {
  static const std::vector<const Path*> paths = usable_paths();
  return paths;
}

}  // namespace

const Path& path_for(int64_t rows) {
  const Path* chosen = forced.load(std::memory_order_relaxed);
  const Path& best = chosen ? *chosen : *usable().back();
#if defined(__x86_64__)
  // A stream of weights is memory bound, so AMX would not speed it up but adds setup cost.
  const bool streams = !chosen && rows <= kStreamRows;
  if (&best == &brgemm_path() && (streams || !brgemm_runs())) return avx512_vnni_path();
#endif
  return best;
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
