// oneDNN's batch-reduce micro-kernels, which torch exports, for AMX. They also support AVX512-VNNI,
// where qfuse's kernel is as fast and needs neither code generation nor copies.
//
// Undocumented limitations:
// - s8 x s8 without AMX silently returns wrong values, so the activation is always unsigned here.
// - K that is not a multiple of 4 crashes with an illegal instruction, so K counts groups of 4.
// - Without `brgemm_release`, a stale tile configuration crashes the thread's next oneDNN call.
// - If oneDNN is disabled, or limited by ONEDNN_MAX_CPU_ISA, brgemm raises; the types that it still
//   supports are probed by a small matmul.
// - Code is generated for every (rows, N, K, strides), per thread, and never freed. So rows are
//   split into few sizes: multiples of 16, and 1 to 15.
#if defined(__x86_64__)
#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <exception>

#include "isa/brgemm.h"

namespace qfuse {
namespace {

constexpr int64_t kSmall = 64;       // rows up to which K is not split
constexpr int64_t kSmallTile = 16;   // one row of AMX tiles
constexpr int64_t kLargeTile = 256;  // its part of A stays in the L2 cache
constexpr int64_t kDepth = 512;      // of K, so that the part of A is small
constexpr int64_t kLanes = 16;       // N is processed in whole vectors

template <class A, class B, class C>
bool multiplies() {
  alignas(64) A a[kGroup] = {};
  alignas(64) B b[kGroup * kLanes] = {};
  alignas(64) C c[kLanes] = {};
  try {
    at::native::cpublas::brgemm(1, kLanes, kGroup, kGroup, kLanes, kLanes, /*add_C=*/false, a, b, c);
    at::native::cpublas::brgemm_release();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// The path whose kernels are used for everything else.
const Path* avx512_vnni = nullptr;

bool switched_on() { return at::globalContext().userEnabledMkldnn(); }

// Probed once, but not while oneDNN is disabled, since it may be enabled again.
bool runs_bf16() {
  if (!switched_on()) return false;
  static const bool runs = multiplies<at::BFloat16, at::BFloat16, float>();
  return runs;
}

int64_t tile_rows(int64_t rows) { return rows < kSmall ? kSmallTile : kLargeTile; }

void multiply_piece(const Tile& t, int64_t row, int64_t rows, int32_t* sums) {
  const int64_t depth = t.groups * kGroup;
  const int64_t step = t.rows < kSmall ? depth : kDepth;
  const int64_t columns = (t.columns + kLanes - 1) / kLanes * kLanes;
  for (int64_t k = 0; k < depth; k += step) {
    at::native::cpublas::brgemm(rows, columns, std::min(step, depth - k), t.lda, kBlock, kBlock,
                                /*add_C=*/k > 0, t.a + row * t.lda + k,
                                reinterpret_cast<const signed char*>(t.b + k * kBlock),
                                sums + row * kBlock);
  }
}

void multiply(const Tile& t, int32_t* sums) {
  if (t.groups == 0) {
    std::fill_n(sums, t.rows * kBlock, 0);
    return;
  }
  const int64_t whole = t.rows / kSmallTile * kSmallTile;
  if (whole > 0) multiply_piece(t, 0, whole, sums);
  if (whole < t.rows) multiply_piece(t, whole, t.rows - whole, sums);
}

// bfloat16 uses oneDNN if it supports it, all other types use qfuse's kernels.
void multiply_real(const RealTile& t, Real type, float* sums) {
  if (type != Real::bf16 || !runs_bf16()) return avx512_vnni->real->multiply(t, type, sums);
  if (t.groups == 0) {
    if (!t.add) std::fill_n(sums, t.rows * kBlock, 0.0f);
    return;
  }
  const int64_t columns = (t.columns + kLanes - 1) / kLanes * kLanes;
  const int64_t whole = t.rows / kSmallTile * kSmallTile;
  const auto* a = static_cast<const at::BFloat16*>(t.a);
  const auto piece = [&](int64_t row, int64_t rows) {
    at::native::cpublas::brgemm(rows, columns, t.groups * kGroup, t.lda, kBlock, kBlock, t.add,
                                a + row * t.lda, static_cast<const at::BFloat16*>(t.panel),
                                sums + row * kBlock);
  };
  if (whole > 0) piece(0, whole);
  if (whole < t.rows) piece(whole, t.rows - whole);
}

RealKernels real_kernels() {
  RealKernels kernels = *avx512_vnni->real;
  kernels.multiply = &multiply_real;
  return kernels;
}

GroupKernels group_kernels() {
  GroupKernels kernels = *avx512_vnni->groups;
  kernels.codes = nullptr;
  kernels.bytes = nullptr;
  return kernels;
}

void release() { at::native::cpublas::brgemm_release(); }

}  // namespace

bool brgemm_runs() {
  if (!switched_on()) return false;
  static const bool runs = multiplies<unsigned char, signed char, int32_t>();
  return runs;
}

const Path& brgemm_path(const Path& other) {
  static const Path path = [&] {
    avx512_vnni = &other;
    static const RealKernels real = real_kernels();
    static const GroupKernels groups = group_kernels();
    Path made = other;
    made.name = "brgemm";
    made.tile_rows = &tile_rows;
    made.dense = true;
    made.multiply = &multiply;
    made.multiply_quantized = nullptr;
    made.release = &release;
    made.real = &real;
    made.groups = &groups;
    return made;
  }();
  return path;
}

}  // namespace qfuse
#endif
