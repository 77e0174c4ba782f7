// RMSNorm, and RMSNorm with rotary positions for queries and keys: one pass over each row where composed tensor
// operations take a dozen.
//
// Letters: N rows, W width of a normalised row, C width of a head.

#include <vector>

#include "common.h"

namespace {

float inverse_rms(const float* x, int64_t width, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < width; ++i) sum += x[i] * x[i];
  return 1.0f / std::sqrt(sum / width + eps);
}

// y = x * r * weight  =>  grad_x = r * (g * weight - x * r^2 * mean(g * weight * x)), grad_weight += g * x * r.
void norm_backward_row(const float* x, const float* weight, const float* grad, int64_t width, float eps, float* grad_x,
                       float* grad_weight) {
  const float r = inverse_rms(x, width, eps);
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t i = 0; i < width; ++i) dot += grad[i] * weight[i] * x[i];
  const float shift = dot / width * r * r;
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) {
    grad_weight[i] += grad[i] * x[i] * r;
    grad_x[i] = r * (grad[i] * weight[i] - x[i] * shift);
  }
}

// Each head's pairs (i, i + C/2) turn by the position's angles; sign -1 turns back, which is the gradient.
void rotate(const float* x, const float* cos, const float* sin, int64_t heads, int64_t head_dim, float sign, float* y) {
  const int64_t half = head_dim / 2;
  for (int64_t h = 0; h < heads; ++h, x += head_dim, y += head_dim) {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[i], b = x[half + i], s = sign * sin[i];
      y[i] = a * cos[i] - b * s;
      y[half + i] = b * cos[i] + a * s;
    }
  }
}

// The threads' partial sums, added in the order of the threads.
void add_partials(const std::vector<float>& partials, int threads, int64_t width, float* out) {
  std::fill_n(out, width, 0.0f);
  for (int t = 0; t < threads; ++t) {
    for (int64_t i = 0; i < width; ++i) out[i] += partials[t * width + i];
  }
}

}  // namespace

extern "C" {

void rms_norm_forward(const float* x, const float* weight, int64_t rows, int64_t width, float eps, float* y,
                      int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t n = 0; n < rows; ++n) {
    const float* row = x + n * width;
    const float r = inverse_rms(row, width, eps);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) y[n * width + i] = row[i] * r * weight[i];
  }
}

void rms_norm_backward(const float* grad_y, const float* x, const float* weight, int64_t rows, int64_t width, float eps,
                       float* grad_x, float* grad_weight, int threads) {
  std::vector<float> partials(threads * width, 0.0f);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int t = 0; t < threads; ++t) {
    for (int64_t n = rows * t / threads; n < rows * (t + 1) / threads; ++n) {
      norm_backward_row(x + n * width, weight, grad_y + n * width, width, eps, grad_x + n * width,
                        partials.data() + t * width);
    }
  }
  add_partials(partials, threads, width, grad_weight);
}

// One of queries and keys: rows of `heads` heads, `stride` floats apart in x (inside the joint projection), dense in y.
// `norm_width` is the width that is normalised together: a head, all heads, or 0 for no norm. The angles repeat every
// `angle_rows` rows.
void norm_rotate_forward(const float* x, int64_t stride, const float* weight, const float* cos, const float* sin,
                         int64_t rows, int64_t angle_rows, int64_t heads, int64_t head_dim, int64_t norm_width,
                         float eps, float* y, int threads) {
  const int64_t width = heads * head_dim, half = head_dim / 2;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> normed(width);
#pragma omp for schedule(static)
    for (int64_t n = 0; n < rows; ++n) {
      const float* row = x + n * stride;
      for (int64_t start = 0; norm_width && start < width; start += norm_width) {
        const float r = inverse_rms(row + start, norm_width, eps);
#pragma omp simd
        for (int64_t i = 0; i < norm_width; ++i) normed[start + i] = row[start + i] * r * weight[i];
      }
      const int64_t angle = n % angle_rows * half;
      rotate(norm_width ? normed.data() : row, cos + angle, sin + angle, heads, head_dim, 1, y + n * width);
    }
  }
}

void norm_rotate_backward(const float* grad_y, const float* x, int64_t stride, const float* weight, const float* cos,
                          const float* sin, int64_t rows, int64_t angle_rows, int64_t heads, int64_t head_dim,
                          int64_t norm_width, float eps, float* grad_x, float* grad_weight, int threads) {
  const int64_t width = heads * head_dim, half = head_dim / 2;
  std::vector<float> partials(threads * norm_width, 0.0f);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int t = 0; t < threads; ++t) {
    std::vector<float> turned(width);
    for (int64_t n = rows * t / threads; n < rows * (t + 1) / threads; ++n) {
      const int64_t angle = n % angle_rows * half;
      rotate(grad_y + n * width, cos + angle, sin + angle, heads, head_dim, -1, turned.data());
      if (!norm_width) std::copy(turned.begin(), turned.end(), grad_x + n * stride);
      for (int64_t start = 0; norm_width && start < width; start += norm_width) {
        norm_backward_row(x + n * stride + start, weight, turned.data() + start, norm_width, eps,
                          grad_x + n * stride + start, partials.data() + t * norm_width);
      }
    }
  }
  if (norm_width) add_partials(partials, threads, norm_width, grad_weight);
}

}  // extern "C"
