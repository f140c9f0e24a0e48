// Which instruction-set path runs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_api.h"

namespace qfuse {

// The path for a product of that many rows: the one that was chosen, else the best one here.
const Path& path_for(int64_t rows);

// Names of the paths that this processor can run, best last.
std::vector<std::string> path_names();

// Makes every product take one path; the empty name takes the choice back. False if the path does
// not exist here. Products that run meanwhile finish on the path that they started on.
bool choose_path(std::string_view name);

// The name that was chosen; empty if each product takes the best path for its size.
std::string chosen_path();

}  // namespace qfuse
