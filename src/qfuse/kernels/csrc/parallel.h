#pragma once

#include <ATen/Parallel.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include <cstdint>

namespace qfuse {

// The first at::parallel_for of a library in a thread sets the number of threads anew, to the one
// that all threads begin with: each library has a copy of the flag that says whether that was done.
// A number that the caller set for this thread alone has to stay.
inline void keep_number_of_threads() {
#ifdef _OPENMP
  thread_local bool kept = false;
  if (!kept) {
    const int threads = at::get_num_threads();
    at::internal::lazy_init_num_threads();
    omp_set_num_threads(threads);
    kept = true;
  }
#endif
}

// at::parallel_for with as many threads as the caller has set for its own thread.
template <typename Work>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Work& work) {
  keep_number_of_threads();
  at::parallel_for(begin, end, grain, work);
}

}  // namespace qfuse
