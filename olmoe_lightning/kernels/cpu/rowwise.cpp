// Rows to and from the memory of peers: each routed row is written straight into its place among its expert's rows,
// wherever they are, and read from there to be summed. A peer is nothing but an address.
//
// Letters: T tokens, K chosen experts, E experts of all processes, E_local of each, N processes, D model width.

#include <vector>

#include "common.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Ends a run of stores past the caches, so that they are seen no later than what is stored next.
inline void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Past the caches: these rows are read by another core, and much later. The caller fences.
inline void copy_row(const char* from, int64_t bytes, char* to) {
#ifdef __AVX512F__
  if (reinterpret_cast<uintptr_t>(to) % 64 == 0 && bytes % 64 == 0) {
    for (int64_t i = 0; i < bytes; i += 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
    }
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

inline float widen(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
inline float widen(float value) { return value; }

// To the nearest, ties to even; NaN stays NaN.
inline void narrow(float value, uint16_t* out) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  *out = nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow(float value, float* out) { *out = value; }

template <typename Value>
void sum(const Value* const* rows, const int32_t* rank, const int32_t* row, int64_t tokens, int64_t k, int64_t width,
         Value* out, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> total(width);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      std::fill(total.begin(), total.end(), 0.0f);
      for (int64_t i = t * k; i < (t + 1) * k; ++i) {
        if (row[i] < 0) continue;
        const Value* from = rows[rank[i]] + row[i] * width;
        float* to = total.data();
#pragma omp simd
        for (int64_t d = 0; d < width; ++d) to[d] += widen(from[d]);
      }
      for (int64_t d = 0; d < width; ++d) narrow(total[d], out + t * width + d);
    }
  }
}

}  // namespace

extern "C" {

// ids [T*K], keep [T*K] or null, base [E]: the next free row of each expert for us -> rank, row [T*K]; row -1: dropped.
void rowwise_plan(const int64_t* ids, const uint8_t* keep, const int32_t* base, int64_t routes, int64_t experts,
                  int64_t experts_local, int32_t* rank, int32_t* row) {
  std::vector<int32_t> next(base, base + experts);
  for (int64_t i = 0; i < routes; ++i) {
    rank[i] = static_cast<int32_t>(ids[i] / experts_local);
    row[i] = keep && !keep[i] ? -1 : next[ids[i]]++;
  }
}

// Row t of x, and the weight of the route, to row row[t, k] of process rank[t, k]. Rows are bytes.
void rowwise_put(const char* x, const float* weights, const int32_t* rank, const int32_t* row, int64_t tokens,
                 int64_t k, int64_t bytes, char** rows, float** row_weights, int threads) {
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = t * k; i < (t + 1) * k; ++i) {
        if (row[i] < 0) continue;
        copy_row(x + t * bytes, bytes, rows[rank[i]] + row[i] * bytes);
        if (weights) row_weights[rank[i]][row[i]] = weights[i];
      }
    }
    fence();
  }
}

// The sum of each token's rows, added in the order of its experts.
void rowwise_sum(void** rows, const int32_t* rank, const int32_t* row, int64_t tokens, int64_t k, int64_t width,
                 int bf16, void* out, int threads) {
  if (bf16) {
    sum(reinterpret_cast<uint16_t**>(rows), rank, row, tokens, k, width, static_cast<uint16_t*>(out), threads);
  } else {
    sum(reinterpret_cast<float**>(rows), rank, row, tokens, k, width, static_cast<float*>(out), threads);
  }
}

// One number per route.
void rowwise_gather(const float* const* row_weights, const int32_t* rank, const int32_t* row, int64_t routes,
                    float* out) {
  for (int64_t i = 0; i < routes; ++i) out[i] = row[i] < 0 ? 0.0f : row_weights[rank[i]][row[i]];
}

// Rows [R] sorted by local expert, then by source: those whose source is another process go to the same place in `to`.
void rowwise_publish(const char* from, const int32_t* counts, int64_t sources, int64_t experts_local, int64_t own,
                     int64_t bytes, char* to, int threads) {
  std::vector<std::pair<int64_t, int64_t>> pieces;
  int64_t end = 0;
  for (int64_t e = 0; e < experts_local; ++e) {
    for (int64_t s = 0; s < sources; ++s) {
      const int64_t start = end;
      end += counts[s * experts_local + e];
      if (s == own || start == end) continue;
      if (!pieces.empty() && pieces.back().second == start) pieces.back().second = end;
      else pieces.push_back({start, end});
    }
  }
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < pieces.size(); ++i) {
      for (int64_t r = pieces[i].first; r < pieces[i].second; ++r) copy_row(from + r * bytes, bytes, to + r * bytes);
    }
    fence();
  }
}

}  // extern "C"
