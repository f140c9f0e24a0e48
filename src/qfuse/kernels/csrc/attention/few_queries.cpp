#include "attention/few_queries.h"

#include <algorithm>
#include <limits>

#include "attention/operand.h"
#include "isa/select.h"
#include "kernel_api.h"
#include "linear/buffer.h"
#include "linear/grain.h"
#include "parallel.h"

namespace qfuse {
namespace {

// Keys that one thread takes at a time. Results are added in their order, so that they do not
// depend on the number of threads.
constexpr int64_t kChunk = 512;
// About what is read in a cycle where the memory is the limit.
constexpr int64_t kBytesPerCycle = 8;
constexpr int64_t kFloat = sizeof(float);

// Rows of adjacent features.
at::Tensor readable_rows(const at::Tensor& x) {
  return x.stride(3) == 1 || x.size(3) == 1 ? x : x.contiguous();
}

class FewQueries {
 public:
  FewQueries(const Attention& a, const at::Tensor& result)
      : keys_in_place_(readable_rows(a.key)),
        values_in_place_(readable_rows(a.value)),
        query_(a.query),
        key_(keys_in_place_),
        value_(values_in_place_),
        kernels_(*path_for(a.query.size(2)).attention),
        batch_(a.query.size(0)),
        heads_(a.query.size(1)),
        kv_heads_(a.key.size(1)),
        group_(heads_ / kv_heads_),
        rows_(a.query.size(2)),
        all_keys_(a.key.size(2)),
        keys_(a.causal ? std::min(all_keys_, rows_) : all_keys_),
        chunks_(parts_of(keys_, kChunk)),
        depth_(a.query.size(3)),
        width_(a.value.size(3)),
        ld_(parts_of(width_, kBlock) * kBlock),
        scale_(static_cast<float>(a.scale)),
        causal_(a.causal),
        out_(result),
        mask_(a.mask, {batch_, heads_, rows_, all_keys_}),
        memory_(batch_ * kv_heads_ * floats_of_head() * kFloat) {}
  FewQueries(const FewQueries&) = delete;
  FewQueries& operator=(const FewQueries&) = delete;

  void run() const {
    const int64_t bytes = std::min(keys_, kChunk) * (depth_ + width_) * key_.size;
    parallel_for(0, batch_ * kv_heads_ * chunks_, grain_of_cycles(bytes / kBytesPerCycle + 1),
                 [&](int64_t begin, int64_t end) {
                   const Work work(*this);
                   for (int64_t i = begin; i < end; ++i) attend(i / chunks_, i % chunks_, work);
                 });
    const int64_t sums = chunks_ * width_ * rows_;
    parallel_for(0, batch_ * heads_, grain_of_cycles(sums / kBytesPerCycle + 1),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) combine(i / heads_, i % heads_);
                 });
  }

 private:
  // Queries that read the same keys.
  int64_t queries() const { return group_ * rows_; }
  int64_t query_ld() const { return parts_of(depth_, kDot) * kDot; }
  // For each chunk, the sums of the queries of a head of keys; then their greatest scores and
  // totals.
  int64_t floats_of_head() const { return chunks_ * queries() * (ld_ + 2); }
  float* sums_of(int64_t kv_head) const { return memory_.as<float>() + kv_head * floats_of_head(); }
  float* greatest_of(int64_t kv_head) const { return sums_of(kv_head) + chunks_ * queries() * ld_; }
  float* total_of(int64_t kv_head) const { return greatest_of(kv_head) + chunks_ * queries(); }

  // Memory of one thread.
  struct Work {
    explicit Work(const FewQueries& few)
        : memory(few.queries() * (few.query_ld() + kChunk + 1) * kFloat),
          scores(memory.as<float>()),
          query(scores + few.queries() * kChunk),
          factor(query + few.queries() * few.query_ld()) {}

    const Buffer memory;
    float* const scores;  // [panels][queries][64]
    float* const query;
    float* const factor;
  };

  void attend(int64_t kv_head, int64_t chunk, const Work& w) const {
    const int64_t b = kv_head / kv_heads_, h = kv_head % kv_heads_, first = chunk * kChunk;
    const int64_t count = std::min(kChunk, keys_ - first), all = queries();
    float* greatest = greatest_of(kv_head) + chunk * all;
    float* total = total_of(kv_head) + chunk * all;
    std::fill(greatest, greatest + all, -std::numeric_limits<float>::infinity());
    std::fill(total, total + all, 0.0f);
    for (int64_t i = 0; i < group_; ++i) {
      kernels_.copy(query_.part(b, h * group_ + i, 0, rows_, 0, depth_), Real::f32, query_ld(),
                    w.query + i * rows_ * query_ld());
    }
    kernels_.multiply_keys(key_.part(b, h, first, count, 0, depth_), w.query, query_ld(), all,
                           w.scores);
    for (int64_t i = 0; i < group_; ++i) {
      const int64_t row = i * rows_;
      ScoreRows s{w.scores + row * kBlock, all, rows_, count, scale_, Real::f32};
      s.visible = causal_ ? 1 - first : keys_;
      mask_.set(s, b, h * group_ + i, 0, first);
      s.greatest = greatest + row;
      s.total = total + row;
      s.factor = w.factor;
      kernels_.softmax(s);
    }
    float* sums = sums_of(kv_head) + chunk * all * ld_;
    std::fill(sums, sums + all * ld_, 0.0f);
    kernels_.add_values(value_.part(b, h, first, count, 0, width_), w.scores, all, ld_, sums);
  }

  void combine(int64_t b, int64_t head) const {
    const int64_t kv_head = b * kv_heads_ + head / group_;
    PartialRows parts{sums_of(kv_head),
                      greatest_of(kv_head),
                      total_of(kv_head),
                      chunks_,
                      queries(),
                      ld_,
                      width_,
                      mask_.adds() ? 1.0f : scale_};
    char* out = static_cast<char*>(out_.mutable_data_ptr());
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t at = b * out_.stride(0) + head * out_.stride(1) + row * out_.stride(2);
      kernels_.combine(parts, head % group_ * rows_ + row, query_.type, out + at * query_.size);
    }
  }

  const at::Tensor keys_in_place_;
  const at::Tensor values_in_place_;
  const Operand query_;
  const Operand key_;
  const Operand value_;
  const AttentionKernels& kernels_;
  const int64_t batch_;
  const int64_t heads_;
  const int64_t kv_heads_;  // heads of keys and values
  const int64_t group_;     // heads of queries for each of them
  const int64_t rows_;
  const int64_t all_keys_;
  const int64_t keys_;  // that some query has
  const int64_t chunks_;
  const int64_t depth_;
  const int64_t width_;
  const int64_t ld_;  // of sums
  const float scale_;
  const bool causal_;
  const at::Tensor out_;
  const Mask mask_;
  const Buffer memory_;
};

}  // namespace

void attend_few(const Attention& a, const at::Tensor& result) { FewQueries(a, result).run(); }

}  // namespace qfuse
