#include "convolution/patches.h"

#include <algorithm>
#include <cstring>

namespace qfuse {
namespace {

constexpr int64_t kChunk = 16;
constexpr int64_t kMostInChunks = 256;  // longer runs are left to memcpy

// Copies a run. Short ones are copied in whole chunks where that does not read past the memory;
// what is written too much is overwritten by the next run, or is behind the panel.
inline uint8_t* copy(uint8_t* to, const uint8_t* from, int64_t bytes, const uint8_t* end) {
  if (bytes <= kMostInChunks && end - from >= bytes + kChunk) {
    for (int64_t i = 0; i < bytes; i += kChunk) __builtin_memcpy(to + i, from + i, kChunk);
  } else {
    std::memcpy(to, from, bytes);
  }
  return to + bytes;
}

inline uint8_t* fill(uint8_t* to, uint8_t value, int64_t bytes) {
  if (bytes > 0) std::memset(to, value, bytes);
  return to + bytes;
}

// Taps [begin, end) of a line read inside when its first tap is at `at`.
struct Inside {
  int64_t begin;
  int64_t end;
};

inline Inside inside(const Line& line, int64_t at, int64_t size) {
  if (at >= 0 && at + (line.taps - 1) * line.tap_step < size) return {0, line.taps};
  const int64_t step = line.tap_step;
  const int64_t begin = at < 0 ? (-at + step - 1) / step : 0;
  const int64_t end = at < size ? (size - at + step - 1) / step : 0;
  return {std::min(begin, line.taps), std::clamp(end, std::min(begin, line.taps), line.taps)};
}

// The position of an output pixel of a phase.
struct Position {
  int64_t image, z, y, x;

  Position(int64_t index, const Phase& phase) {
    x = index % phase.line[2].pixels;
    index /= phase.line[2].pixels;
    y = index % phase.line[1].pixels;
    index /= phase.line[1].pixels;
    z = index % phase.line[0].pixels;
    image = index / phase.line[0].pixels;
  }

  void advance(const Phase& phase) {
    if (++x < phase.line[2].pixels) return;
    x = 0;
    if (++y < phase.line[1].pixels) return;
    y = 0;
    if (++z < phase.line[0].pixels) return;
    z = 0;
    ++image;
  }
};

}  // namespace

void gather(const Patches& p, int64_t first, int64_t count, int64_t channel, uint8_t* panel,
            int64_t ld) {
  const auto& [lz, ly, lx] = p.phase.line;
  const auto& strides = p.x.strides.axis;
  const int64_t c = p.channels;
  const int64_t line_bytes = lx.taps * c;
  const int64_t plane_bytes = ly.taps * line_bytes;
  const int64_t step_z = lz.tap_step * strides[0];
  const int64_t step_y = ly.tap_step * strides[1];
  const int64_t step_x = lx.tap_step * strides[2];
  const bool adjacent = step_x == c;
  Position at(first, p.phase);
  for (int64_t i = 0; i < count; ++i, at.advance(p.phase)) {
    uint8_t* to = panel + i * ld;
    const int64_t z = lz.first + at.z * lz.step;
    const int64_t y = ly.first + at.y * ly.step;
    const int64_t x = lx.first + at.x * lx.step;
    const Inside in_z = inside(lz, z, p.in[0]);
    const Inside in_y = inside(ly, y, p.in[1]);
    const Inside in_x = inside(lx, x, p.in[2]);
    const int64_t from = at.image * p.x.strides.image + z * strides[0] + y * strides[1] +
                         x * strides[2] + channel;
    to = fill(to, p.zero, in_z.begin * plane_bytes);
    for (int64_t tz = in_z.begin; tz < in_z.end; ++tz) {
      to = fill(to, p.zero, in_y.begin * line_bytes);
      for (int64_t ty = in_y.begin; ty < in_y.end; ++ty) {
        const int64_t line = from + tz * step_z + ty * step_y;
        to = fill(to, p.zero, in_x.begin * c);
        const int64_t runs = adjacent ? in_x.begin < in_x.end : in_x.end - in_x.begin;
        const int64_t bytes = adjacent ? (in_x.end - in_x.begin) * c : c;
        for (int64_t run = 0; run < runs; ++run) {
          const int64_t offset = line + (in_x.begin + run) * step_x;
          to = copy(to, p.x.data + offset, bytes, p.x.end);
        }
        to = fill(to, p.zero, (lx.taps - in_x.end) * c);
      }
      to = fill(to, p.zero, (ly.taps - in_y.end) * line_bytes);
    }
    to = fill(to, p.zero, (lz.taps - in_z.end) * plane_bytes);
  }
}

}  // namespace qfuse
