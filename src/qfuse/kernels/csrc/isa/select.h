// Which instruction-set path runs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_api.h"

namespace qfuse {

// The path for a matmul with that many rows: the selected one, else the best one here.
const Path& path_for(int64_t rows);

// Names of the paths that this processor supports, best last.
std::vector<std::string> path_names();

// Selects one path for all matmuls; an empty name resets the selection. False if the path is not
// supported here. Matmuls already running finish on the path that they started on.
bool choose_path(std::string_view name);

// The selected name; empty if each matmul uses the best path for its size.
std::string chosen_path();

}  // namespace qfuse
