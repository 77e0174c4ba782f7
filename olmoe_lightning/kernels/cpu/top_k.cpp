// The k largest of each row in falling order; among equals the lower index first.
//
// Letters: T rows, E values per row, K chosen.

#include "common.h"

namespace {

// A float's bits as an integer that orders like the float; both zeros are equal, a positive NaN is above everything.
inline int32_t ordered(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits < 0 ? (bits ^ 0x7fffffff) + 1 : bits;
}

}  // namespace

extern "C" {

void top_k_rows(const float* values, int64_t rows, int64_t size, int64_t k, int64_t* indices, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < rows; ++t) {
    const float* row = values + t * size;
    int64_t* best = indices + t * k;
    int64_t found = 0;
    int32_t least = 0;  // key of the last one in `best`, once there are k
    for (int64_t j = 0; j < size; ++j) {
      const int32_t key = ordered(row[j]);
      if (found == k && key <= least) continue;
      int64_t place = found < k ? found++ : k - 1;
      for (; place > 0 && ordered(row[best[place - 1]]) < key; --place) best[place] = best[place - 1];
      best[place] = j;
      least = ordered(row[best[found - 1]]);
    }
  }
}

}  // extern "C"
