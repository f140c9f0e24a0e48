// The tile registers of AMX: eight of up to 16 rows of 64 bytes.
#pragma once

#include <cstdint>

namespace {

constexpr int kTiles = 8;
constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // of a row

// How many rows each register has, in the layout that the processor loads.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

}  // namespace
