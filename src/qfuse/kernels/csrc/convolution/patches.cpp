#include "convolution/patches.h"

#include <algorithm>
#include <array>
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
  } else if (bytes > 0) {  // an empty image has no memory
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

  // By a number of pixels that does not go beyond the line.
  void advance(const Phase& phase, int64_t pixels) {
    x += pixels;
    if (x < phase.line[2].pixels) return;
    x = 0;
    if (++y < phase.line[1].pixels) return;
    y = 0;
    if (++z < phase.line[0].pixels) return;
    z = 0;
    ++image;
  }
};

// Writes the rows of a panel.
class Gathering {
 public:
  Gathering(const Path& path, const Patches& p, int64_t channel, int64_t ld)
      : path_(path), p_(p), channel_(channel), ld_(ld) {
    const auto& [lz, ly, lx] = p.phase.line;
    adjacent_ = lx.tap_step * p.x.strides.axis[2] == p.channels;
    line_runs_ = adjacent_ ? 1 : lx.taps;
    bytes_ = adjacent_ ? lx.taps * p.channels : p.channels;
    const int64_t runs = lz.taps * ly.taps * line_runs_;
    if (lx.taps == 0 || runs == 0 || runs > kMostRuns || bytes_ > kLongestRun) return;
    // Output pixels of a line whose taps along x are all inside.
    const int64_t reach = (lx.taps - 1) * lx.tap_step;
    const int64_t last = p.in[2] - 1 - reach - lx.first;
    begin_ = lx.first < 0 ? (-lx.first + lx.step - 1) / lx.step : 0;
    end_ = last < 0 ? 0 : std::min(last / lx.step + 1, lx.pixels);
  }

  // Writes up to `most` rows of one line, and returns how many.
  int64_t write(const Position& at, int64_t most, uint8_t* to) {
    if (at.x >= begin_ && at.x < end_) {
      const int64_t count = copy_whole(at, std::min(most, end_ - at.x), to);
      if (count > 0) return count;
    }
    write_one(at, to);
    return 1;
  }

 private:
  static constexpr int64_t kMostRuns = 64;

  int64_t offset(const Position& at, int64_t z, int64_t y, int64_t x) const {
    const auto& strides = p_.x.strides;
    return at.image * strides.image + z * strides.axis[0] + y * strides.axis[1] +
           x * strides.axis[2] + channel_;
  }

  // Copies rows without taps beside a line; lines outside are read from bytes of the zero point.
  // Returns 0 if that would read past the memory.
  int64_t copy_whole(const Position& at, int64_t count, uint8_t* to) {
    const auto& [lz, ly, lx] = p_.phase.line;
    const int64_t z = lz.first + at.z * lz.step;
    const int64_t y = ly.first + at.y * ly.step;
    const int64_t x = lx.first + at.x * lx.step;
    const int64_t step = lx.step * p_.x.strides.axis[2];
    int64_t runs = 0;
    int64_t last = 0;  // offset of the last run of the first row
    for (int64_t tz = 0; tz < lz.taps; ++tz) {
      const int64_t in_z = z + tz * lz.tap_step;
      for (int64_t ty = 0; ty < ly.taps; ++ty) {
        const int64_t in_y = y + ty * ly.tap_step;
        const bool inside = in_z >= 0 && in_z < p_.in[0] && in_y >= 0 && in_y < p_.in[1];
        for (int64_t r = 0; r < line_runs_; ++r, ++runs) {
          const int64_t from = inside ? offset(at, in_z, in_y, x + r * lx.tap_step) : 0;
          from_[runs] = inside ? p_.x.data + from : zeros();
          step_[runs] = inside ? step : 0;
          last = std::max(last, from);
        }
      }
    }
    const int64_t room = p_.x.end - p_.x.data - last - bytes_ - kRunSlack;
    if (room < 0) return 0;
    if (step > 0) count = std::min(count, room / step + 1);
    path_.copy_rows({from_.data(), step_.data(), runs, bytes_, count, to, ld_});
    return count;
  }

  void write_one(const Position& at, uint8_t* to) const {
    const auto& [lz, ly, lx] = p_.phase.line;
    const auto& strides = p_.x.strides.axis;
    const int64_t c = p_.channels;
    const int64_t line_bytes = lx.taps * c;
    const int64_t plane_bytes = ly.taps * line_bytes;
    const int64_t z = lz.first + at.z * lz.step;
    const int64_t y = ly.first + at.y * ly.step;
    const int64_t x = lx.first + at.x * lx.step;
    const Inside in_z = inside(lz, z, p_.in[0]);
    const Inside in_y = inside(ly, y, p_.in[1]);
    const Inside in_x = inside(lx, x, p_.in[2]);
    const int64_t from = offset(at, z, y, x);
    to = fill(to, p_.zero, in_z.begin * plane_bytes);
    for (int64_t tz = in_z.begin; tz < in_z.end; ++tz) {
      to = fill(to, p_.zero, in_y.begin * line_bytes);
      for (int64_t ty = in_y.begin; ty < in_y.end; ++ty) {
        const int64_t line = from + tz * lz.tap_step * strides[0] + ty * ly.tap_step * strides[1];
        to = fill(to, p_.zero, in_x.begin * c);
        const int64_t taps = in_x.end - in_x.begin;
        const int64_t runs = adjacent_ ? taps > 0 : taps;
        const int64_t bytes = adjacent_ ? taps * c : c;
        for (int64_t run = 0; run < runs; ++run) {
          const int64_t offset = line + (in_x.begin + run) * lx.tap_step * strides[2];
          to = copy(to, p_.x.data + offset, bytes, p_.x.end);
        }
        to = fill(to, p_.zero, (lx.taps - in_x.end) * c);
      }
      to = fill(to, p_.zero, (ly.taps - in_y.end) * line_bytes);
    }
    fill(to, p_.zero, (lz.taps - in_z.end) * plane_bytes);
  }

  const uint8_t* zeros() {
    if (!zeros_filled_) zeros_.fill(p_.zero);
    zeros_filled_ = true;
    return zeros_.data();
  }

  const Path& path_;
  const Patches& p_;
  const int64_t channel_;
  const int64_t ld_;
  bool adjacent_;
  int64_t line_runs_;  // of a line of taps
  int64_t bytes_;      // of a run
  int64_t begin_ = 0;
  int64_t end_ = 0;
  std::array<const uint8_t*, kMostRuns> from_;
  std::array<int64_t, kMostRuns> step_;
  std::array<uint8_t, kLongestRun + kRunSlack> zeros_;
  bool zeros_filled_ = false;
};

}  // namespace

void gather(const Path& path, const Patches& p, int64_t first, int64_t count, int64_t channel,
            uint8_t* panel, int64_t ld) {
  Gathering gathering(path, p, channel, ld);
  Position at(first, p.phase);
  for (int64_t i = 0; i < count;) {
    const int64_t rows = gathering.write(at, count - i, panel + i * ld);
    i += rows;
    at.advance(p.phase, rows);
  }
}

}  // namespace qfuse
