// Which instruction-set path runs, and where its functions are.
//
// Each path is a library of its own, which is loaded when it is needed. Libraries have names: that
// of their path, except that there are two of avx_vnni.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_api.h"

namespace qfuse {

// The path for a matmul with that many rows: the selected one, else the best one that is loaded.
const Path& path_for(int64_t rows);

// Names of the paths that this processor supports, best last.
std::vector<std::string> path_names();

// Names of those whose functions are loaded.
std::vector<std::string> loaded_paths();

// The libraries that have to be loaded, in this order, before a path can be selected. An empty name
// stands for the best path here. Empty if there are none, or the path is not supported here.
std::vector<std::string> missing_libraries(std::string_view name);

// Loads the file of a library that this processor supports, unless it is loaded.
void load_path(std::string_view library, std::string_view file);

// Selects one path for all matmuls; an empty name resets the selection. Raises if the path is not
// supported here or not loaded. Matmuls already running finish on the path that they started on.
void choose_path(std::string_view name);

// The selected name; empty if each matmul uses the best path for its size.
std::string chosen_path();

}  // namespace qfuse
