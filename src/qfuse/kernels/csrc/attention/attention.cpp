#include "attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "isa/select.h"
#include "kernel_api.h"
#include "linear/buffer.h"
#include "linear/grain.h"
#include "parallel.h"
#include "tensors.h"

namespace qfuse {
namespace {

// Queries that share what is read of the keys and values; a multiple of the rows of every tile.
constexpr int64_t kQueries = 48;
// Keys whose scores are computed before they are used, so that they stay in the L2 cache.
constexpr int64_t kChunk = 512;
// With fewer queries, keys and values are read less often than packing would read them. The rule
// lower-attention leaves calls to torch that never have as many.
constexpr int64_t kLeastQueries = 16;
// About what the products reach with AVX512.
constexpr int64_t kProductsPerCycle = 16;

inline int64_t whole_groups(int64_t size) { return parts_of(size, kGroup) * kGroup; }

// The four axes of a tensor: batch, head, row and feature.
template <class Element>
struct Strided {
  explicit Strided(const at::Tensor& x)
      : data(data_of(x)),
        batch(x.stride(0)),
        head(x.stride(1)),
        row(x.stride(2)),
        feature(x.stride(3)) {}

  Element* at(int64_t b, int64_t h, int64_t r) const {
    return data + b * batch + h * head + r * row;
  }

  static Element* data_of(const at::Tensor& x) {
    if constexpr (std::is_const_v<Element>) {
      return x.const_data_ptr<float>();
    } else {
      return x.mutable_data_ptr<float>();
    }
  }

  Element* data;
  int64_t batch;
  int64_t head;
  int64_t row;
  int64_t feature;
};

// A row times a factor, followed by zeros up to `padded`.
void copy_row(const float* from, int64_t stride, int64_t size, float factor, int64_t padded,
              float* to) {
  if (stride == 1) {
    for (int64_t i = 0; i < size; ++i) to[i] = from[i] * factor;
  } else {
    for (int64_t i = 0; i < size; ++i) to[i] = from[i * stride] * factor;
  }
  std::fill(to + size, to + padded, 0.0f);
}

void check_axes(const at::Tensor& x, const char* name) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.dim() == 4, name,
              " must be float32 [batch, heads, rows, features], not ", x.scalar_type(), " ",
              x.sizes());
}

// What is the same for all queries of a call.
class Call {
 public:
  Call(const Attention& a, const at::Tensor& result)
      : query_(a.query),
        key_(a.key),
        value_(a.value),
        path_(path_for(a.query.size(2))),
        batch_(a.query.size(0)),
        heads_(a.query.size(1)),
        shared_(a.key.size(1)),
        rows_(a.query.size(2)),
        keys_(a.key.size(2)),
        depth_(a.query.size(3)),
        width_(a.value.size(3)),
        scale_(static_cast<float>(a.scale)),
        causal_(a.causal),
        out_(result) {
    if (!a.mask) return;
    std::vector<int64_t> sizes = a.mask->sizes().vec();
    sizes.back() = keys_;
    at::Tensor mask = a.mask->expand(sizes);
    if (mask.stride(-1) != 1) mask = mask.contiguous();
    mask_ = mask.expand({batch_, heads_, rows_, keys_});
    is_bool_ = mask_.scalar_type() == at::kBool;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void run() const {
    const int64_t pairs = batch_ * shared_, panels = parts_of(keys_, kBlock);
    const int64_t blocks = parts_of(rows_, kQueries), each = heads_ / shared_;
    const int64_t products = std::min(rows_, kQueries) * keys_ * (depth_ + width_);
    const int64_t cycles = std::max<int64_t>(products / kProductsPerCycle, 1);
    const int64_t threads = at::get_num_threads();
    if (pairs % threads == 0 || pairs >= 4 * threads) {
      // Every thread packs what it reads, which stays in its cache.
      parallel_for(
          0, pairs, grain_of_cycles(cycles * blocks * each), [&](int64_t begin, int64_t end) {
            const Buffer packed(bytes_of_pair());
            for (int64_t pair = begin; pair < end; ++pair) {
              for (int64_t panel = 0; panel < panels; ++panel) {
                pack(pair, panel, packed.as<float>());
              }
              attend(pair * each * blocks, (pair + 1) * each * blocks, packed.as<float>(), 0);
            }
          });
    } else {
      const Buffer packed(pairs * bytes_of_pair());
      const int64_t size = bytes_of_pair() / static_cast<int64_t>(sizeof(float));
      parallel_for(0, pairs * panels, grain_of_cycles(kBlock * (depth_ + width_)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) {
                       pack(i / panels, i % panels, packed.as<float>() + i / panels * size);
                     }
                   });
      parallel_for(
          0, batch_ * heads_ * blocks, grain_of_cycles(cycles),
          [&](int64_t begin, int64_t end) { attend(begin, end, packed.as<float>(), size); });
    }
  }

 private:
  int64_t floats_of_keys() const { return parts_of(keys_, kBlock) * kBlock * whole_groups(depth_); }
  int64_t bytes_of_pair() const {
    const int64_t values = parts_of(width_, kBlock) * parts_of(keys_, kBlock) * kBlock * kBlock;
    return (floats_of_keys() + values) * static_cast<int64_t>(sizeof(float));
  }
  // Where the values of a pair are, for 64 features.
  int64_t place_of_values(int64_t block, int64_t key) const {
    return floats_of_keys() + (block * parts_of(keys_, kBlock) * kBlock + key) * kBlock;
  }

  // Packs 64 keys as [features][64], and their values as [keys][64] for every 64 features.
  void pack(int64_t pair, int64_t panel, float* to) const {
    const int64_t b = pair / shared_, h = pair % shared_, first = panel * kBlock;
    const int64_t count = std::min(kBlock, keys_ - first), depth = whole_groups(depth_);
    float* keys = to + first * depth;
    if (count < kBlock) std::fill(keys, keys + kBlock * depth, 0.0f);
    std::fill(keys + kBlock * depth_, keys + kBlock * depth, 0.0f);
    for (int64_t j = 0; j < count; ++j) {
      const float* from = key_.at(b, h, first + j);
      for (int64_t d = 0; d < depth_; ++d) keys[d * kBlock + j] = from[d * key_.feature];
    }
    for (int64_t block = 0; block * kBlock < width_; ++block) {
      float* values = to + place_of_values(block, first);
      const int64_t columns = std::min(kBlock, width_ - block * kBlock);
      for (int64_t j = 0; j < count; ++j) {
        const float* from = value_.at(b, h, first + j) + block * kBlock * value_.feature;
        copy_row(from, value_.feature, columns, 1.0f, kBlock, values + j * kBlock);
      }
      std::fill(values + count * kBlock, values + whole_groups(count) * kBlock, 0.0f);
    }
  }

  // What one thread works on; the sizes in floats are those of its memory.
  struct Work {
    Work(int64_t depth, int64_t keys, int64_t width)
        : memory((kQueries * (depth + keys + width + 3)) * static_cast<int64_t>(sizeof(float))),
          query(memory.as<float>()),
          scores(query + kQueries * depth),
          sums(scores + kQueries * keys),
          greatest(sums + kQueries * width),
          total(greatest + kQueries),
          factor(total + kQueries) {}

    const Buffer memory;
    float* const query;   // [kQueries][features]
    float* const scores;  // [panels][kQueries][64]
    float* const sums;    // [features / 64][kQueries][64]
    float* const greatest;
    float* const total;
    float* const factor;
  };

  // Queries of one head.
  struct Block {
    int64_t batch;
    int64_t head;
    int64_t first;
    int64_t rows;
    const float* packed;  // its keys and values
  };

  // Blocks of queries, numbered by batch, head and place. `distance` is that of packed pairs, 0 if
  // there is one.
  void attend(int64_t begin, int64_t end, const float* packed, int64_t distance) const {
    const int64_t blocks = parts_of(rows_, kQueries), each = heads_ / shared_;
    const int64_t keys = std::min(parts_of(keys_, kBlock) * kBlock, kChunk);
    const Work work(whole_groups(depth_), keys, parts_of(width_, kBlock) * kBlock);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / blocks, number = i % blocks;
      // From both ends: with `causal`, later blocks have more keys, and threads adjacent blocks.
      const int64_t first = (number % 2 ? blocks - 1 - number / 2 : number / 2) * kQueries;
      attend({head / heads_, head % heads_, first, std::min(kQueries, rows_ - first),
              packed + head / each * distance},
             work);
    }
  }

  void attend(const Block& q, const Work& w) const {
    const int64_t depth = whole_groups(depth_);
    for (int64_t i = 0; i < q.rows; ++i) {
      const float* from = query_.at(q.batch, q.head, q.first + i);
      copy_row(from, query_.feature, depth_, scale_, depth, w.query + i * depth);
    }
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
      const float* panel = q.packed + (first + key) * depth;
      const int64_t columns = std::min(kBlock, count - key);
      const RealTile tile{w.query, depth, q.rows, panel, depth / kGroup, columns, false};
      path_.real->multiply(tile, Real::f32, w.scores + key * kQueries);
    }
    ScoreRows s{w.scores, kQueries, q.rows, count};
    s.visible = causal_ ? q.first - first + 1 : keys_;
    if (mask_.defined()) set_mask(q, first, s);
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
        const float* panel = q.packed + place_of_values(block, first + key);
        const int64_t groups = parts_of(std::min(kBlock, count - key), kGroup);
        const RealTile tile{weights, kBlock, q.rows, panel, groups, columns, first + key > 0};
        path_.real->multiply(tile, Real::f32, sums);
      }
    }
  }

  void write(const Block& q, const Work& w) const {
    for (int64_t i = 0; i < q.rows; ++i) {
      float* out = out_.at(q.batch, q.head, q.first + i);
      // A query without keys.
      const float inverse = w.total[i] == 0.0f ? 0.0f : 1.0f / w.total[i];
      for (int64_t block = 0; block * kBlock < width_; ++block) {
        const float* sums = w.sums + (block * kQueries + i) * kBlock;
        const int64_t columns = std::min(kBlock, width_ - block * kBlock);
        for (int64_t j = 0; j < columns; ++j) out[block * kBlock + j] = sums[j] * inverse;
      }
    }
  }

  void set_mask(const Block& q, int64_t key, ScoreRows& s) const {
    const int64_t at =
        q.batch * mask_.stride(0) + q.head * mask_.stride(1) + q.first * mask_.stride(2) + key;
    s.mask = static_cast<const char*>(mask_.const_data_ptr()) + at * mask_.element_size();
    s.mask_ld = mask_.stride(2);
    s.is_bool = is_bool_;
  }

  const Strided<const float> query_;
  const Strided<const float> key_;
  const Strided<const float> value_;
  const Path& path_;
  const int64_t batch_;
  const int64_t heads_;
  const int64_t shared_;  // heads of keys and values
  const int64_t rows_;
  const int64_t keys_;
  const int64_t depth_;
  const int64_t width_;
  const float scale_;
  const bool causal_;
  const Strided<float> out_;
  at::Tensor mask_;  // [batch, heads, rows, keys]
  bool is_bool_ = false;
};

void check(const Attention& a) {
  check_axes(a.query, "query");
  check_axes(a.key, "key");
  check_axes(a.value, "value");
  const auto q = a.query.sizes(), k = a.key.sizes(), v = a.value.sizes();
  TORCH_CHECK(q[0] == k[0] && q[0] == v[0] && k[1] == v[1] && k[2] == v[2] && q[3] == k[3],
              "query, key and value do not fit: ", q, ", ", k, ", ", v);
  TORCH_CHECK(k[1] > 0 && q[1] % k[1] == 0, q[1], " heads of queries are not a multiple of ", k[1],
              " of keys");
  // torch's kernel multiplies minus infinity by the scale where a key is not seen.
  const auto scale = static_cast<float>(a.scale);
  TORCH_CHECK(scale > 0 && std::isfinite(scale),
              "the scale must be positive and finite in float32, not ", a.scale);
  if (!a.mask) return;
  TORCH_CHECK(!a.causal, "a causal attention takes no mask");
  const at::ScalarType type = a.mask->scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBool, "the mask must be float32 or bool, not ",
              type);
  const int64_t axes = a.mask->dim();
  TORCH_CHECK(axes >= 2 && axes <= 4 && (a.mask->size(-1) == k[2] || a.mask->size(-1) == 1),
              "the mask must have two to four axes and a column per key: ", a.mask->sizes());
}

}  // namespace

at::Tensor attention(const Attention& a) {
  check(a);
  const int64_t batch = a.query.size(0), heads = a.query.size(1), rows = a.query.size(2);
  const int64_t width = a.value.size(3);
  const at::Tensor result =
      a.heads_first ? empty_tensor({batch, heads, rows, width}, a.query.options())
                    : empty_tensor({batch, rows, heads, width}, a.query.options()).transpose(1, 2);
  if (result.numel() == 0) return result;
  if (rows < kLeastQueries || a.query.numel() == 0 || a.key.numel() == 0) {
    result.copy_(torch_attention(a.query, a.key, a.value, a.mask, a.causal, a.scale));
  } else {
    Call(a, result).run();
  }
  return result;
}

}  // namespace qfuse
