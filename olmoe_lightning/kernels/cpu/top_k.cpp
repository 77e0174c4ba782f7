// The k largest of each row in falling order; among equals the lower index first.
//
// Letters: T rows, E values per row, K chosen.

#include <vector>

#include "common.h"

namespace {

// A float's bits as an integer that orders like the float; both zeros are equal, a positive NaN is above everything.
// Never the smallest integer.
inline int32_t ordered(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits < 0 ? (bits ^ 0x7fffffff) + 1 : bits;
}

}  // namespace

extern "C" {

// Two passes for each of the k, vectorised and without branches on the values, which no processor predicts.
void top_k_rows(const float* values, int64_t rows, int64_t size, int64_t k, int64_t* indices, int threads) {
#pragma omp parallel num_threads(threads)
  {
    // Whole vectors: the padding is what is taken already.
    const int32_t count = static_cast<int32_t>((size + 15) / 16 * 16);
    std::vector<int32_t> keys(count, INT32_MIN);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < rows; ++t) {
      const float* row = values + t * size;
      int32_t* key = keys.data();
#pragma omp simd
      for (int64_t j = 0; j < size; ++j) key[j] = ordered(row[j]);
      for (int64_t i = 0; i < k; ++i) {
        int32_t most = INT32_MIN, first = count;
#pragma omp simd reduction(max : most)
        for (int32_t j = 0; j < count; ++j) most = key[j] > most ? key[j] : most;
#pragma omp simd reduction(min : first)
        for (int32_t j = 0; j < count; ++j) {
          const int32_t place = key[j] == most ? j : count;
          first = place < first ? place : first;
        }
        indices[t * k + i] = first;
        key[first] = INT32_MIN;  // taken
      }
    }
  }
}

}  // extern "C"
