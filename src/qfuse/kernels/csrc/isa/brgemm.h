#pragma once

#include "kernel_api.h"

namespace qfuse {

#if defined(__x86_64__)
// The path that multiplies with oneDNN; all other kernels are those of `avx512_vnni`.
const Path& brgemm_path(const Path& avx512_vnni);

// Whether oneDNN is usable now: it may be disabled, or limited to fewer instruction sets.
bool brgemm_runs();
#endif

}  // namespace qfuse
