// What the CPU kernels share: single-threaded matrix products through the BLAS that torch was built with, and an
// exponential that the compiler can vectorise. Everything is fp32 and row-major.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

extern "C" void sgemm_(const char* transa, const char* transb, const int* m, const int* n, const int* k,
                       const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
                       const float* beta, float* c, const int* ldc);

// The BLAS is column-major: it sees each row-major matrix transposed, so operands swap places.
// Leading dimensions (distance between rows) default to dense rows. beta 1 adds to c, 0 overwrites it.

// c[m, n] = alpha * a[m, k] @ b[n, k]^T
inline void matmul_nt(int m, int n, int k, const float* a, int lda, const float* b, int ldb, float* c, int ldc,
                      float alpha = 1, float beta = 0) {
  sgemm_("T", "N", &n, &m, &k, &alpha, b, &ldb, a, &lda, &beta, c, &ldc);
}
inline void matmul_nt(int m, int n, int k, const float* a, const float* b, float* c) {
  matmul_nt(m, n, k, a, k, b, k, c, n);
}

// c[m, n] = alpha * a[m, k] @ b[k, n]
inline void matmul_nn(int m, int n, int k, const float* a, int lda, const float* b, int ldb, float* c, int ldc,
                      float alpha = 1, float beta = 0) {
  sgemm_("N", "N", &n, &m, &k, &alpha, b, &ldb, a, &lda, &beta, c, &ldc);
}
inline void matmul_nn(int m, int n, int k, const float* a, const float* b, float* c) {
  matmul_nn(m, n, k, a, k, b, n, c, n);
}

// c[m, n] = alpha * a[k, m]^T @ b[k, n]
inline void matmul_tn(int m, int n, int k, const float* a, int lda, const float* b, int ldb, float* c, int ldc,
                      float alpha = 1, float beta = 0) {
  sgemm_("N", "T", &n, &m, &k, &alpha, b, &ldb, a, &lda, &beta, c, &ldc);
}
inline void matmul_tn(int m, int n, int k, const float* a, const float* b, float* c, bool accumulate) {
  matmul_tn(m, n, k, a, m, b, n, c, n, 1, accumulate ? 1 : 0);
}

// exp(x) to about 2 ulp: 2^n times a polynomial on [-ln2/2, ln2/2]. Free of branches and calls, so that the loops it
// is used in vectorise. The clamp turns NaN into a number: a caller has to bring it back, for example by a factor x.
inline float fast_exp(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  const float n = std::floor(x * 1.44269504f + 0.5f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r * r + r) + 1.0f;
  const int32_t exponent = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return p * scale;
}

// The largest of a row, -inf of an empty one. With std::max, which takes references, the loop would not vectorise.
inline float row_max(const float* x, int64_t count) {
  float top = -INFINITY;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < count; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

// Copies past the caches: for what is read again only much later, so that it neither evicts what is at work nor is
// fetched from memory before it is overwritten.
inline void stream_copy(const float* from, int64_t count, float* to) {
#ifdef __AVX512F__
  if (reinterpret_cast<uintptr_t>(to) % 64 == 0 && count % 16 == 0) {
    for (int64_t i = 0; i < count; i += 16) _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
    _mm_sfence();
    return;
  }
#endif
  std::memcpy(to, from, count * sizeof(float));
}

// A thread's working memory, kept between calls: fresh memory would be cleared by the system, and again by the vector.
// The content is what the last user of the slot left.
template <int Slot>
inline float* scratch(int64_t count) {
  static thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
  return memory.data();
}
