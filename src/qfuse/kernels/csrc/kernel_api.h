// The interface between the instruction-set paths and the operators: plain structures and function
// pointers.
//
// Each path (isa/*.cpp) is a library of its own, compiled with its own flags. It must not include
// anything that defines inline functions with external linkage: the loader could keep the copy
// compiled for AVX512 for all callers.
#pragma once

#include <cstdint>

#include "attention_api.h"
#include "group_api.h"

namespace qfuse {

// Packed weights are [N / 64][K / 4][64][4]: for each block of 64 output features, four consecutive
// k of every feature are adjacent, as the dot product instructions of all paths require.
constexpr int64_t kBlock = 64;  // output features per block
constexpr int64_t kGroup = 4;   // adjacent consecutive k
constexpr int64_t kLine = 64;   // bytes of a line of the caches

constexpr int64_t kMaxSteps = 8;
constexpr int64_t kMaxExtras = 4;

enum class Real : int32_t { f32, bf16, f16 };
constexpr int64_t bytes_of(Real type) { return type == Real::f32 ? 4 : 2; }

// Rows of a float tensor: `data + row * ld` is the first element of a row; elements are adjacent.
struct RealRows {
  const void* data;
  int64_t ld;
  Real type;
};

enum class Element : int32_t { f32, bf16, f16, s8, u8 };

// Rows of a tensor of any of these types.
struct ElementRows {
  const void* data;
  int64_t ld;
  Element type;
};

enum class StepKind : int32_t {
  relu,
  gelu,
  gelu_tanh,
  silu,
  sigmoid,
  tanh,
  hardtanh,
  hardswish,
  hardsigmoid,
  leaky_relu,
  elu,
  mish,
  quick_gelu,
  squared_relu,
  add,
  mul,
  prelu,
  cast,
  round,
};

// One epilogue op. Its result is rounded to `type`, as in torch. Quantized operands of add and mul
// are dequantized first: (q - b) * scale.
struct Step {
  StepKind kind;
  int32_t extra;  // of add, mul and prelu
  // Of add: alpha; of hardtanh: low; of leaky_relu: slope; of elu: factor of negative values; of
  // quick_gelu: factor in the sigmoid; of round: 1 / scale.
  float a;
  // Of hardtanh: high; of elu: factor of positive values; of round and of quantized operands: zero
  // point.
  float b;
  Real type;
  float low = 0;  // of round: the quantized range
  float high = 0;
  float scale = 0;  // of round and of quantized operands; of elu: of its input
};

// How a float result is quantized:
// clamp(round(y * factor) + zero, low, high), or y / factor, or round(y * factor + zero).
struct Quantizer {
  float factor;
  float zero;
  float low;
  float high;
  bool divide;
  bool zero_first;
  Real type;  // that every operation rounds to; float32 for linears
  // Whether it is clamp(round(clamp(y * factor, least, most)) + zero, low, high), or y / factor,
  // with an integer zero: the clamp in front then suffices.
  bool plain = false;
  float least = 0;
  float most = 0;
};

// What is applied to the sums of a matmul. In this order, all in float32:
//   y = total * x_scale * w_scale (+ bias), rounded to `real`;
//   the epilogue ops; the quantizer or the conversion to the output type.
// With a GLU: ops up to `front` apply to both halves, from there to `gate` to the gate, from there
// to `up` to the other half, and the rest to the product.
// Integer sums: total = float(sum - x_zero * w_sum - w_zero * x_sum). The difference is int32 and
// wraps: only its final value has to fit, see linear_w8a8.cpp. Float sums: total = sum; a null
// scale means one.
struct Epilogue {
  bool real_sums;
  const float* x_scale;   // one, or one per row
  const int32_t* x_zero;  // one, or one per row; of the bytes as multiplied
  const int32_t* x_sums;  // one per row; null if w_zero is null
  bool scale_per_row;
  bool zero_per_row;
  const float* w_scale;   // one per output feature, or null with float sums
  const int32_t* w_sums;  // one per output feature
  const int32_t* w_zero;  // one per output feature, or null
  const float* bias;      // one per output feature, or null
  Real real;
  int64_t steps;
  Step step[kMaxSteps];
  ElementRows extra[kMaxExtras];
  int64_t half;  // features of a GLU half, which are those of the result; 0 without a GLU
  int64_t front;
  int64_t gate;
  int64_t up;
  bool up_first;  // whether the gate is the second half
  Real product;   // type that the product is rounded to
  Element out_type;
  void* out;
  int64_t out_ld;
  int64_t out_row;  // with which `out` begins
  Quantizer quantizer;
};

// Memory that is read after a tile. Its products may fetch some lines of it at a time, which moves
// `begin`; many lines at once would delay what they read themselves.
struct Following {
  Following() = default;
  Following(const void* data, int64_t bytes)
      : begin(static_cast<const char*>(data)), end(begin + bytes) {}

  const char* begin = nullptr;
  const char* end = nullptr;
};

// A tile of a matmul: sums[i * 64 + j] = sum over k of (a[i * lda + k] ^ flip) * b[k][j],
// wrapping. The bytes of `a` are unsigned after the flip: 0x80 per byte makes u8 = s8 + 128 of
// signed ones. A path that keeps their sign multiplies them as they are, see `keeps_sign`.
struct Tile {
  const uint8_t* a;
  int64_t lda;
  uint32_t flip;
  int64_t rows;
  const int8_t* b;
  int64_t groups;  // of four k
  int64_t
      columns;  // valid columns of the block, 1 to 64; the rest of `sums` is undefined
  Following* following = nullptr;
};

// Depthwise sums of adjacent output pixels, for up to 64 channels: sums[i * 64 + c] is the sum over
// the taps t of (pixel[i * step + tap[t]][channel + c] ^ flip) * weight[t / 4][place of c][t % 4],
// wrapping. The place of a channel is (c / 4 % 4) * 16 + c / 16 * 4 + c % 4.
// Bytes are unsigned after the flip, as in Tile. Of each pixel, 16, 32 or 64 bytes may be read, the
// least that hold the channels; taps without a weight have weight 0 and any pixel.
struct DepthwiseTile {
  const uint8_t* const* pixel;
  const int32_t* tap;  // [groups][4]
  int64_t step;
  int64_t groups;   // of four taps
  int64_t channel;  // the first one
  int64_t channels;
  int64_t pixels;
  const int8_t* weight;  // [groups][64][4]
  // The weight that gives the sums of the following pixel from the taps of a pixel, or null.
  const int8_t* next;
  bool flip;
};

constexpr int64_t kLongestRun = 384;  // bytes
constexpr int64_t kRunSlack = 64;

// Rows of a patch matrix, each of `runs` runs of at most kLongestRun bytes, one after the other. Run
// `r` of row `i` is copied from from[r] + i * step[r]. kRunSlack bytes behind each run may be read,
// and as many behind each row be written, before the next row is.
struct PatchRows {
  const uint8_t* const* from;
  const int64_t* step;
  int64_t runs;
  int64_t bytes;
  int64_t rows;
  uint8_t* to;
  int64_t ld;
};

// A tile of a float matmul: sums[i * 64 + j] = sum over k of a[i * lda + k] * panel[k][j],
// accumulated if `add`. `a` and the panel have the same type, float32 or bfloat16; the sums are
// float32.
struct RealTile {
  const void* a;
  int64_t lda;
  int64_t rows;
  const void* panel;  // float32 [K][64], bfloat16 [K / 2][64][2]
  int64_t groups;     // of four k
  int64_t columns;
  bool add;
  Following* following = nullptr;
};

// Depthwise sums of adjacent output pixels, for up to 64 channels: sums[i * 64 + c] is the sum over
// the taps t of pixel[i * step + tap[t]][channel + c] * panel[t][c], in their order.
struct RealDepthwiseTile {
  const float* const* pixel;
  const int32_t* tap;  // [taps]
  int64_t step;
  int64_t taps;
  int64_t channel;  // the first one
  int64_t channels;
  int64_t pixels;
  const float* panel;  // [taps][64]
};

constexpr int64_t kStreamRows = 4;

// The format of packed weights.
enum class Format : int32_t { four, eight, e4m3, e5m2, half };

// One block of a packed weight, and the parameters of its groups along K. A weight is
//   (code - zero) * scale + offset
// rounded to `compute` after the product and after the sum, and to `real` at the end.
struct RealBlock {
  const uint8_t* codes;  // 32-bit words [depth / values per word][64]
  int64_t depth;         // input features, padded to whole words
  int64_t group;         // input features per group: a multiple of 8, or all
  const float* scale;    // [groups][64]; null if the epilogue scales: weights are `code - zero`
  const int8_t* zero;    // [groups][64]; null if all are the middle code, or 0 of eight bits. Of
                         // codes of four bits the four lowest count.
  const float* offset;   // [groups][64], or null
  Real compute;
  Real real;
};

// Matmuls of float activations with weights of a number of bits.
struct CodeKernels {
  // Writes a panel of `depth` weights per feature, from input feature `k` on.
  void (*widen)(const RealBlock& block, int64_t k, int64_t depth, Real type, void* panel);
  // The type of rows that `stream` requires. bfloat16 for four bits has the order of `kStreamOrder`
  // in every eight input features; float32 for other bits is less than `kStreamLarge`.
  Real (*stream_type)(Real x, int64_t rows);
  // For at most kStreamRows rows, where weights are read once: sums without a panel. Weights are
  // not rounded; the scale multiplies the sum of a group.
  void (*stream)(const RealBlock& block, const void* a, int64_t lda, int64_t rows, int64_t columns,
                 float* sums);
};

// A stream in float32 multiplies rows by 8-bit weights times kStreamRaise, and the sum of each
// group by its inverse. Neither a value below kStreamLarge nor any sum of such values that fits
// into memory overflows float32 then.
constexpr float kStreamRaise = 0x1p24f;
constexpr float kStreamLarge = 0x1p60f;
constexpr int64_t kStreamOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};

// Of a type to multiply in: the k that are adjacent in a panel.
constexpr int64_t pair_of(Real type) { return type == Real::bf16 ? 2 : 1; }

// Matmuls of float activations with packed weights.
struct RealKernels {
  // The type to multiply in: bfloat16 only if `x` is and the processor has instructions for it.
  Real (*type_for)(Real x);
  void (*multiply)(const RealTile& tile, Real type, float* sums);
  void (*depthwise)(const RealDepthwiseTile& tile, float* sums);
  CodeKernels four;
  CodeKernels eight;
  CodeKernels e4m3;
  CodeKernels e5m2;
  CodeKernels half;  // for activations of float32
};

enum class RowKind : int32_t { plain, rms_norm, layer_norm };

// Rows of floats, or of 8-bit values that stand for rounded((value - zero) * scale).
struct RowSource {
  ElementRows rows;
  Real real;           // of the floats
  const float* scale;  // of row i at i * step; null for floats, as is `zero`
  const float* zero;
  int64_t step;  // 0 for one scale, 1 for one per row
};

// Rowwise quantization in one pass: (x + residual), a norm, the epilogue ops. Everything is float32
// except where a type is named; the values there are rounded to it.
struct RowJob {
  RowKind kind;
  int64_t columns;
  RowSource x;
  RowSource residual;  // data is null if there is none
  Real sum_type;      // of x + residual
  float eps;
  Real inner;           // of the normalized row before the weight
  const float* weight;  // one per column, or null
  const float* bias;    // one per column, or null
  Real real;            // of the norm's result
  int64_t steps;
  Step step[kMaxSteps];
  ElementRows extra[kMaxExtras];
  // Extra outputs, contiguous, or null.
  void* kept_sum;
  void* kept;
  Real kept_type;
  int8_t* codes;  // contiguous
};

// The minimum and maximum of a row; both are NaN if it contains a NaN.
struct Extremes {
  float least;
  float greatest;
};

// Adjacent columns of rows of 8-bit values that stand for (code - zero) * scale in float32, or of
// float32. The epilogue ops and the quantizer of an epilogue apply to them; its rows of extras and
// of the result begin with these, and its other fields have no meaning.
struct StoredRows {
  ElementRows rows;
  int64_t columns;
  const float* scale;  // one per column; null for floats, as is `zero`
  const float* zero;
  const Epilogue* epilogue;
};

struct RowKernels {
  // Computes `count` rows, and finds their extremes. Row i goes to values + i * ld, with space for
  // columns + 64.
  void (*compute)(const RowJob& job, int64_t first, int64_t count, float* values, int64_t ld,
                  Extremes* found);
  // Quantizes a row that was computed.
  void (*encode)(const RowJob& job, int64_t row, const float* values, const Extremes& extremes,
                 const Quantizer& quantizer);
  // Computes and quantizes `count` rows, without their extremes, by a plain quantizer in float32.
  // `values` has space for two rows as above.
  void (*write)(const RowJob& job, int64_t first, int64_t count, float* values, int64_t ld,
                const Quantizer& quantizer);
  // Quantizes `count` rows after the epilogue ops.
  void (*requantize)(const StoredRows& rows, int64_t count);
};

struct DigitKernels;

// One instruction-set path.
struct Path {
  const char* name;
  // Maximum rows of a tile for a matmul with that many rows.
  int64_t (*tile_rows)(int64_t rows);
  // Whether `multiply` takes rows with a flip as signed bytes, and does not flip them. Zero points
  // and sums of such rows are then those of signed bytes too.
  bool keeps_sign;
  // Whether `multiply` flips rows in the units that multiply, for every block again.
  bool flips_slowly;
  // How many rows of so many bytes, at most, are multiplied with all weights before the next rows
  // are. Null where each block of weights is multiplied with all rows first.
  int64_t (*most_strip_rows)(int64_t bytes);
  void (*multiply)(const Tile& tile, int32_t* sums);
  // Multiplies a tile of any height and writes what `finish` writes of its sums, without storing
  // all of them. Returns false, with nothing written, where the epilogue is none that it takes:
  // that depends neither on the rows nor on their number. Null where a path has none.
  bool (*multiply_finished)(const Tile& tile, const Epilogue& e, int64_t row, int64_t column);
  void (*depthwise)(const DepthwiseTile& tile, int32_t* sums);
  bool (*depthwise_quantized)(const DepthwiseTile& tile, const Epilogue& e, int64_t row, int64_t column);
  void (*copy_rows)(const PatchRows& rows);
  // `sums` are int32, or float32 if the epilogue says so.
  // Writes `rows` rows from `row` on, features [column, column + columns).
  void (*finish)(const Epilogue& epilogue, const void* sums, int64_t row, int64_t rows,
                 int64_t column, int64_t columns);
  // The same with a GLU: columns of the result, from the sums of both halves.
  void (*finish_halves)(const Epilogue& epilogue, const void* first, const void* second,
                        int64_t row, int64_t rows, int64_t column, int64_t columns);
  // Releases processor state that `multiply` set up; called on each thread at the end of its work.
  void (*release)();
  const RealKernels* real;
  const RowKernels* rows;
  const GroupKernels* groups;
  const AttentionKernels* attention;
  const DigitKernels* digits;  // null where a path has none
};

}  // namespace qfuse

// The function that the library of a path exports, see isa/select.cpp. `base` is the path that it
// begins with, or null if it needs none.
#define QFUSE_PATH_LIBRARY \
  extern "C" __attribute__((visibility("default"))) const qfuse::Path* qfuse_path
