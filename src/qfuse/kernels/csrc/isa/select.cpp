#include "isa/select.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <atomic>
#include <map>
#include <mutex>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace qfuse {
namespace {

// A path that this processor supports.
struct Usable {
  const char* name;
  const char* library;
};

// The library whose path the path of `library` begins with; empty if there is none.
std::string base_of(const std::string& library) {
  if (library == "avx_vnni" || library == "avx_vnni_evex") return "avx2";
  if (library == "avx512_vnni") return "avx512";
  if (library == "amx" || library == "amx_emulated") return "avx512_vnni";
  return "";
}

#if defined(__x86_64__)
// Compilers that are older than the instructions do not know their name.
bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

// Whether the processor multiplies tiles of bytes and of bfloat16, and the system lets this process
// use them: Linux does so, once for all threads, when it is asked.
bool may_use_amx() {
  constexpr unsigned kBits = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, -TILE and -INT8
  constexpr long kAskForState = 0x1023, kTiles = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBits) != kBits) return false;
  return syscall(SYS_arch_prctl, kAskForState, kTiles) == 0;
}

// The best one last.
void add_x86_paths(std::vector<Usable>& paths) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return;
  paths.push_back({"avx2", "avx2"});
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
  if (has_avx_vnni()) {
    paths.push_back({"avx_vnni", "avx_vnni"});
  } else if (has_vnni) {
    // The same kernels in the encoding of AVX512-VNNI.
    paths.push_back({"avx_vnni", "avx_vnni_evex"});
  }
  if (has_avx512) paths.push_back({"avx512", "avx512"});
  if (!has_vnni) return;
  // It can be chosen, to test what AMX runs, but is slower than the path that it begins with.
  paths.push_back({"amx_emulated", "amx_emulated"});
  paths.push_back({"avx512_vnni", "avx512_vnni"});
  if (may_use_amx()) paths.push_back({"amx", "amx"});
}
#endif

std::vector<Usable> usable_paths() {
  std::vector<Usable> paths{{"portable", "portable"}};
#if defined(__x86_64__)
  add_x86_paths(paths);
#endif
  return paths;
}

// Computed once, since the processor does not change.
const std::vector<Usable>& usable() {
  static const std::vector<Usable> paths = usable_paths();
  return paths;
}

std::mutex loading;
std::map<std::string, const Path*>& libraries() {
  static std::map<std::string, const Path*> loaded;  // by name, guarded by `loading`
  return loaded;
}

std::atomic<const Path*> forced{nullptr};
std::atomic<const Path*> best{nullptr};  // of those that are loaded
std::atomic<const Path*> amx{nullptr};
std::atomic<const Path*> avx512_vnni{nullptr};

// Null if the library of the path is not loaded.
const Path* loaded_path(const Usable& usable) {
  const auto found = libraries().find(usable.library);
  return found == libraries().end() ? nullptr : found->second;
}

const Usable* find_usable(std::string_view name) {
  if (name.empty()) return &usable().back();
  for (const Usable& path : usable()) {
    if (name == path.name) return &path;
  }
  return nullptr;
}

const Path* open_path(const std::string& library, const std::string& file) {
  const std::string base = base_of(library);
  TORCH_CHECK(base.empty() || libraries().count(base), "the kernels of ", library, " need those of ",
              base);
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(handle, "the kernels of ", library, " cannot be loaded: ", dlerror());
  using Entry = const Path* (*)(const Path*);
  const auto entry = reinterpret_cast<Entry>(dlsym(handle, "qfuse_path"));
  TORCH_CHECK(entry, file, " has no kernels");
  return entry(base.empty() ? nullptr : libraries()[base]);
}

}  // namespace

const Path& path_for(int64_t rows) {
  const Path* chosen = forced.load(std::memory_order_acquire);
  const Path* path = chosen ? chosen : best.load(std::memory_order_acquire);
  TORCH_CHECK(path, "no kernels for this processor are loaded; call qfuse.kernels.load()");
  // A stream of weights is memory bound, so AMX would not speed it up but adds setup cost.
  const bool streams = !chosen && rows <= kStreamRows;
  if (streams && path == amx.load(std::memory_order_relaxed)) {
    return *avx512_vnni.load(std::memory_order_relaxed);
  }
  return *path;
}

std::vector<std::string> path_names() {
  std::vector<std::string> names;
  for (const Usable& path : usable()) names.emplace_back(path.name);
  return names;
}

std::vector<std::string> loaded_paths() {
  const std::lock_guard<std::mutex> lock(loading);
  std::vector<std::string> names;
  for (const Usable& path : usable()) {
    if (loaded_path(path)) names.emplace_back(path.name);
  }
  return names;
}

std::vector<std::string> missing_libraries(std::string_view name) {
  const Usable* path = find_usable(name);
  if (!path) return {};
  const std::lock_guard<std::mutex> lock(loading);
  std::vector<std::string> missing;
  for (std::string library = path->library; !library.empty(); library = base_of(library)) {
    if (!libraries().count(library)) missing.insert(missing.begin(), library);
  }
  return missing;
}

void load_path(std::string_view name, std::string_view file) {
  const std::string library(name);
  bool runs = false;
  for (const Usable& path : usable()) {
    for (std::string part = path.library; !part.empty(); part = base_of(part)) {
      runs = runs || library == part;
    }
  }
  TORCH_CHECK(runs, "this processor lacks instructions for the kernels of ", library);
  const std::lock_guard<std::mutex> lock(loading);
  if (libraries().count(library)) return;
  libraries()[library] = open_path(library, std::string(file));
  for (const Usable& path : usable()) {
    const Path* found = loaded_path(path);
    if (!found) continue;
    if (path.library == std::string_view("amx")) amx = found;
    if (path.name == std::string_view("avx512_vnni")) avx512_vnni = found;
  }
  for (const Usable& path : usable()) {
    if (const Path* found = loaded_path(path)) best = found;
  }
}

void choose_path(std::string_view name) {
  if (name.empty()) {
    forced = nullptr;
    return;
  }
  const Usable* path = find_usable(name);
  TORCH_CHECK(path, "no kernel path '", name, "' on this processor");
  const std::lock_guard<std::mutex> lock(loading);
  const Path* found = loaded_path(*path);
  TORCH_CHECK(found, "the kernel path '", name, "' is not loaded");
  forced = found;
}

std::string chosen_path() {
  const Path* path = forced.load();
  return path ? path->name : "";
}

}  // namespace qfuse
