#include "attention/attention.h"

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "attention/few_queries.h"
#include "attention/operand.h"
#include "isa/select.h"
#include "kernel_api.h"
#include "linear/buffer.h"
#include "linear/grain.h"
#include "linear/operands.h"
#include "parallel.h"
#include "tensors.h"

namespace qfuse {
namespace {

// Queries that share what is read of the keys and values; a multiple of the rows of every tile.
constexpr int64_t kQueries = 48;
// Keys whose scores are computed before they are used, so that they stay in the L2 cache.
constexpr int64_t kChunk = 512;
// With fewer queries, keys and values are read less often than packing would read them.
constexpr int64_t kLeastQueries = 16;
// About what the products reach with AVX512 in float32; twice as many in bfloat16.
constexpr int64_t kProductsPerCycle = 16;

inline int64_t whole_groups(int64_t size) { return parts_of(size, kGroup) * kGroup; }

void check_axes(const at::Tensor& x, const char* name, at::ScalarType type) {
  TORCH_CHECK(x.scalar_type() == type && x.dim() == 4, name, " must be ", type,
              " [batch, heads, rows, features], not ", x.scalar_type(), " ", x.sizes());
}

// What is the same for all queries of a call.
class Call {
 public:
  Call(const Attention& a, const at::Tensor& result)
      : query_(a.query),
        key_(a.key),
        value_(a.value),
        path_(path_for(a.query.size(2))),
        product_(path_.real->type_for(query_.type)),
        size_(bytes_of(product_)),
        batch_(a.query.size(0)),
        heads_(a.query.size(1)),
        kv_heads_(a.key.size(1)),
        rows_(a.query.size(2)),
        keys_(a.key.size(2)),
        depth_(a.query.size(3)),
        width_(a.value.size(3)),
        scale_(static_cast<float>(a.scale)),
        causal_(a.causal),
        out_(static_cast<char*>(result.mutable_data_ptr())),
        out_batch_(result.stride(0)),
        out_head_(result.stride(1)),
        out_row_(result.stride(2)),
        mask_(a.mask, {batch_, heads_, rows_, keys_}) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void run() const {
    const int64_t kv_heads = batch_ * kv_heads_, panels = parts_of(keys_, kBlock);
    const int64_t blocks = parts_of(rows_, kQueries), group = heads_ / kv_heads_;
    const int64_t products = std::min(rows_, kQueries) * keys_ * (depth_ + width_);
    const int64_t cycles = std::max<int64_t>(products / (kProductsPerCycle * pair_of(product_)), 1);
    const int64_t threads = at::get_num_threads();
    if (kv_heads % threads == 0 || kv_heads >= 4 * threads) {
      // Every thread packs what it reads, which stays in its cache.
      parallel_for(0, kv_heads, grain_of_cycles(cycles * blocks * group),
                   [&](int64_t begin, int64_t end) {
                     const Buffer packed(bytes_of_kv_head());
                     for (int64_t kv_head = begin; kv_head < end; ++kv_head) {
                       for (int64_t panel = 0; panel < panels; ++panel) {
                         pack(kv_head, panel, packed.as<char>());
                       }
                       attend(kv_head * group * blocks, (kv_head + 1) * group * blocks,
                              packed.as<char>(), 0);
                     }
                     path_.release();
                   });
    } else {
      const Buffer packed(kv_heads * bytes_of_kv_head());
      parallel_for(0, kv_heads * panels, grain_of_cycles(kBlock * (depth_ + width_)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) {
                       pack(i / panels, i % panels,
                            packed.as<char>() + i / panels * bytes_of_kv_head());
                     }
                   });
      parallel_for(0, batch_ * heads_ * blocks, grain_of_cycles(cycles),
                   [&](int64_t begin, int64_t end) {
                     attend(begin, end, packed.as<char>(), bytes_of_kv_head());
                     path_.release();
                   });
    }
  }

 private:
  // Bytes of the packed keys of a head, and of its keys and values.
  int64_t bytes_of_keys() const {
    return parts_of(keys_, kBlock) * kBlock * whole_groups(depth_) * size_;
  }
  int64_t bytes_of_kv_head() const {
    return bytes_of_keys() +
           parts_of(width_, kBlock) * parts_of(keys_, kBlock) * kBlock * kBlock * size_;
  }
  // Where the keys of a panel are, and their values for 64 features.
  int64_t place_of_keys(int64_t key) const { return key * whole_groups(depth_) * size_; }
  int64_t place_of_values(int64_t block, int64_t key) const {
    return bytes_of_keys() + (block * parts_of(keys_, kBlock) * kBlock + key) * kBlock * size_;
  }

  // Packs 64 keys as the columns of a panel, and their values as rows of one for every 64 features.
  void pack(int64_t kv_head, int64_t panel, char* to) const {
    const int64_t b = kv_head / kv_heads_, h = kv_head % kv_heads_, first = panel * kBlock;
    const int64_t count = std::min(kBlock, keys_ - first);
    const AttentionKernels& kernels = *path_.attention;
    kernels.pack_columns(key_.part(b, h, first, count, 0, depth_), product_, whole_groups(depth_),
                         to + place_of_keys(first));
    for (int64_t block = 0; block * kBlock < width_; ++block) {
      const int64_t column = block * kBlock, columns = std::min(kBlock, width_ - column);
      kernels.pack_rows(value_.part(b, h, first, count, column, columns), product_,
                        whole_groups(count), to + place_of_values(block, first));
    }
  }

  // Memory of one thread, for padded sizes; queries of bfloat16 take half of their part.
  struct Work {
    Work(int64_t depth, int64_t keys, int64_t width)
        : memory((kQueries * (keys + width + depth + 3)) * static_cast<int64_t>(sizeof(float))),
          scores(memory.as<float>()),
          sums(scores + kQueries * keys),
          greatest(sums + kQueries * width),
          total(greatest + kQueries),
          factor(total + kQueries),
          query(factor + kQueries) {}

    const Buffer memory;
    float* const scores;  // [panels][kQueries][64]; weights in bfloat16 are in the first halves
    float* const sums;    // [features / 64][kQueries][64]
    float* const greatest;
    float* const total;
    float* const factor;
    void* const query;  // [kQueries][features]
  };

  // Queries of one head.
  struct Block {
    int64_t batch;
    int64_t head;
    int64_t first;
    int64_t rows;
    const char* packed;  // its keys and values
  };

  // Blocks of queries, numbered by batch, head and place. `distance` is that of the packed heads of
  // keys, or 0 if one is packed.
  void attend(int64_t begin, int64_t end, const char* packed, int64_t distance) const {
    const int64_t blocks = parts_of(rows_, kQueries), group = heads_ / kv_heads_;
    const int64_t keys = std::min(parts_of(keys_, kBlock) * kBlock, kChunk);
    const Work work(whole_groups(depth_), keys, parts_of(width_, kBlock) * kBlock);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / blocks, number = i % blocks;
      // From both ends: with `causal`, later blocks have more keys, and threads adjacent blocks.
      const int64_t first = (number % 2 ? blocks - 1 - number / 2 : number / 2) * kQueries;
      attend({head / heads_, head % heads_, first, std::min(kQueries, rows_ - first),
              packed + head / group * distance},
             work);
    }
  }

  void attend(const Block& q, const Work& w) const {
    path_.attention->copy(query_.part(q.batch, q.head, q.first, q.rows, 0, depth_), product_,
                          whole_groups(depth_), w.query);
    std::fill(w.greatest, w.greatest + q.rows, -std::numeric_limits<float>::infinity());
    std::fill(w.total, w.total + q.rows, 0.0f);
    const int64_t keys = causal_ ? std::min(keys_, q.first + q.rows) : keys_;
    for (int64_t key = 0; key < keys; key += kChunk) {
      const int64_t count = std::min(kChunk, keys - key);
      weigh(q, key, count, w);
      add_values(q, key, count, w);
    }
    write(q, w);
  }

  // Computes the weights of `count` keys.
  void weigh(const Block& q, int64_t first, int64_t count, const Work& w) const {
    const int64_t depth = whole_groups(depth_);
    for (int64_t key = 0; key < count; key += kBlock) {
      const char* panel = q.packed + place_of_keys(first + key);
      const int64_t columns = std::min(kBlock, count - key);
      const RealTile tile{w.query, depth, q.rows, panel, depth / kGroup, columns, false};
      path_.real->multiply(tile, product_, w.scores + key * kQueries);
    }
    ScoreRows s{w.scores, kQueries, q.rows, count, scale_, product_};
    s.visible = causal_ ? q.first - first + 1 : keys_;
    mask_.set(s, q.batch, q.head, q.first, first);
    s.greatest = w.greatest;
    s.total = w.total;
    s.factor = w.factor;
    path_.attention->softmax(s);
  }

  // Adds the weighted values of `count` keys to the sums.
  void add_values(const Block& q, int64_t first, int64_t count, const Work& w) const {
    for (int64_t block = 0; block * kBlock < width_; ++block) {
      float* sums = w.sums + block * kQueries * kBlock;
      const int64_t columns = std::min(kBlock, width_ - block * kBlock);
      if (first > 0) {
        for (int64_t i = 0; i < q.rows; ++i) {
          for (int64_t j = 0; j < columns; ++j) sums[i * kBlock + j] *= w.factor[i];
        }
      }
      for (int64_t key = 0; key < count; key += kBlock) {
        const float* weights = w.scores + key * kQueries;
        const char* panel = q.packed + place_of_values(block, first + key);
        const int64_t groups = parts_of(std::min(kBlock, count - key), kGroup);
        const RealTile tile{
            weights, kBlock * pair_of(product_), q.rows, panel, groups, columns, first + key > 0};
        path_.real->multiply(tile, product_, sums);
      }
    }
  }

  void write(const Block& q, const Work& w) const {
    const int64_t at = q.batch * out_batch_ + q.head * out_head_ + q.first * out_row_;
    path_.attention->write({w.sums, kQueries, q.rows, width_, w.total, out_ + at * query_.size,
                            out_row_, query_.type});
  }

  const Operand query_;
  const Operand key_;
  const Operand value_;
  const Path& path_;
  const Real product_;  // the type of products
  const int64_t size_;  // of an element of that
  const int64_t batch_;
  const int64_t heads_;
  const int64_t kv_heads_;  // heads of keys and values
  const int64_t rows_;
  const int64_t keys_;
  const int64_t depth_;
  const int64_t width_;
  const float scale_;
  const bool causal_;
  char* const out_;
  const int64_t out_batch_;
  const int64_t out_head_;
  const int64_t out_row_;
  const Mask mask_;
};

void check(const Attention& a) {
  const at::ScalarType type = a.query.scalar_type();
  real_of(type, "query");  // throws for others
  check_axes(a.query, "query", type);
  check_axes(a.key, "key", type);
  check_axes(a.value, "value", type);
  const auto q = a.query.sizes(), k = a.key.sizes(), v = a.value.sizes();
  TORCH_CHECK(q[0] == k[0] && q[0] == v[0] && k[1] == v[1] && k[2] == v[2] && q[3] == k[3],
              "query, key and value do not fit: ", q, ", ", k, ", ", v);
  TORCH_CHECK(k[1] > 0 && q[1] % k[1] == 0, q[1], " heads of queries are not a multiple of ", k[1],
              " of keys");
  std::vector<int64_t> order = a.order.vec();
  std::sort(order.begin(), order.end());
  TORCH_CHECK(order == std::vector<int64_t>({0, 1, 2}),
              "the order of the result's axes must be a permutation of 0, 1 and 2, not ", a.order);
  // torch's kernel multiplies minus infinity by the scale where a key is not seen.
  const auto scale = static_cast<float>(a.scale);
  // The softmax multiplies it by the logarithm of e to the base 2.
  TORCH_CHECK(scale > 0 && scale <= 0x1p127f,
              "the scale must be positive and at most 2^127, not ", a.scale);
  if (!a.mask) return;
  TORCH_CHECK(!a.causal, "a causal attention takes no mask");
  const at::ScalarType added = a.mask->scalar_type();
  TORCH_CHECK(added == type || added == at::kFloat || added == at::kBool,
              "the mask must be bool, float32 or of the queries' dtype, not ", added);
  const int64_t axes = a.mask->dim();
  TORCH_CHECK(axes >= 2 && axes <= 4, "the mask must have two to four axes: ", a.mask->sizes());
  const std::array<int64_t, 4> scores{q[0], q[1], q[2], k[2]};
  for (int64_t axis = 0; axis < axes; ++axis) {
    const int64_t size = a.mask->size(axis);
    TORCH_CHECK(size == 1 || size == scores[axis + 4 - axes], "the mask ", a.mask->sizes(),
                " does not broadcast to the scores ", at::IntArrayRef(scores));
  }
}

at::Tensor empty_result(const Attention& a) {
  std::array<int64_t, 4> sizes{}, axes{0, 1, 2, 3};
  for (int64_t i = 0; i < 3; ++i) {
    sizes[i] = a.query.size(a.order[i]);
    axes[a.order[i]] = i;
  }
  sizes[3] = a.value.size(3);
  return empty_tensor(sizes, a.query.options()).permute(axes);
}

}  // namespace

at::Tensor attention(const Attention& a) {
  check(a);
  const at::Tensor result = empty_result(a);
  if (result.numel() == 0) return result;
  if (a.query.numel() == 0 || a.key.numel() == 0) {
    result.copy_(torch_attention(a.query, a.key, a.value, a.mask, a.causal, a.scale));
  } else if (a.query.size(2) < kLeastQueries) {
    attend_few(a, result);
  } else {
    Call(a, result).run();
  }
  return result;
}

}  // namespace qfuse
