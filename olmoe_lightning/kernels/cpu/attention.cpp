// Causal attention inside documents. A query sees the keys from its document's start up to itself, so what is visible
// is a range: blocks of queries multiply only the keys that some query of the block sees.
//
// Letters: B batch, S sequence, Hq query heads, Hkv key/value heads, C head width. Queries, keys, values and outputs are
// [B, S, H, C]; first_key [B, S] is the first key that a query sees; lse [B, Hq, S] are the softmax's logarithms.

#include "common.h"

namespace {

constexpr int64_t kBlock = 64;

struct Shape {
  int64_t batch, seq, heads, kv_heads, head_dim;
};

// The keys that the queries of a block see at all: from the smallest first key to the last query.
struct Range {
  int64_t queries, first, keys;
};

Range visible(const int32_t* first_key, int64_t start, int64_t seq) {
  const int64_t end = std::min(start + kBlock, seq);
  const int64_t first = *std::min_element(first_key + start, first_key + end);
  return {end - start, first, end - first};
}

// In place, row by row: probabilities of the visible keys, zero for the others; returns the logarithm of their sum.
float softmax_row(float* scores, int64_t keys, int64_t from, int64_t to) {
  const float top = row_max(scores + from, to - from);
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = from; j < to; ++j) {
    // The difference times zero is NaN when a score is not finite, which the clamp inside fast_exp would hide.
    scores[j] = fast_exp(scores[j] - top) + (scores[j] - scores[j]);
    sum += scores[j];
  }
  const float scale = 1.0f / sum;
#pragma omp simd
  for (int64_t j = from; j < to; ++j) scores[j] *= scale;
  std::fill(scores, scores + from, 0.0f);
  std::fill(scores + to, scores + keys, 0.0f);
  return top + std::log(sum);
}

}  // namespace

extern "C" {

void attention_forward(const float* q, const float* k, const float* v, const int32_t* first_key, int64_t batch,
                       int64_t seq, int64_t heads, int64_t kv_heads, int64_t head_dim, float scale, float* out,
                       float* lse, int threads) {
  const int64_t q_stride = heads * head_dim, kv_stride = kv_heads * head_dim, group = heads / kv_heads;
#pragma omp parallel num_threads(threads)
  {
    float* scores = scratch<0>(kBlock * seq);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < batch * heads; ++task) {
      const int64_t b = task / heads, h = task % heads;
      const float* qh = q + b * seq * q_stride + h * head_dim;
      const float* kh = k + b * seq * kv_stride + h / group * head_dim;
      const float* vh = v + b * seq * kv_stride + h / group * head_dim;
      const int32_t* firsts = first_key + b * seq;
      for (int64_t start = 0; start < seq; start += kBlock) {
        const auto [queries, first, keys] = visible(firsts, start, seq);
        matmul_nt(queries, keys, head_dim, qh + start * q_stride, q_stride, kh + first * kv_stride, kv_stride,
                  scores, keys, scale);
        for (int64_t i = 0; i < queries; ++i) {
          lse[task * seq + start + i] =
              softmax_row(scores + i * keys, keys, firsts[start + i] - first, start + i + 1 - first);
        }
        matmul_nn(queries, head_dim, keys, scores, keys, vh + first * kv_stride, kv_stride,
                  out + (b * seq + start) * q_stride + h * head_dim, q_stride);
      }
    }
  }
}

// A thread owns a key/value head of a sequence and all query heads that share it, so that it alone adds to its gradients.
void attention_backward(const float* grad_out, const float* q, const float* k, const float* v, const float* out,
                        const float* lse, const int32_t* first_key, int64_t batch, int64_t seq, int64_t heads,
                        int64_t kv_heads, int64_t head_dim, float scale, float* grad_q, float* grad_k, float* grad_v,
                        int threads) {
  const int64_t q_stride = heads * head_dim, kv_stride = kv_heads * head_dim, group = heads / kv_heads;
#pragma omp parallel num_threads(threads)
  {
    float* probs = scratch<0>(kBlock * seq);
    float* grad_probs = scratch<1>(kBlock * seq);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < batch * kv_heads; ++task) {
      const int64_t b = task / kv_heads, kv_head = task % kv_heads;
      const int64_t kv_offset = b * seq * kv_stride + kv_head * head_dim;
      const int32_t* firsts = first_key + b * seq;
      for (int64_t s = 0; s < seq; ++s) {
        std::fill_n(grad_k + kv_offset + s * kv_stride, head_dim, 0.0f);
        std::fill_n(grad_v + kv_offset + s * kv_stride, head_dim, 0.0f);
      }
      for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        for (int64_t start = 0; start < seq; start += kBlock) {
          const auto [queries, first, keys] = visible(firsts, start, seq);
          const int64_t q_offset = (b * seq + start) * q_stride + h * head_dim;
          const int64_t k_offset = kv_offset + first * kv_stride;
          matmul_nt(queries, keys, head_dim, q + q_offset, q_stride, k + k_offset, kv_stride, probs, keys, scale);
          matmul_nt(queries, keys, head_dim, grad_out + q_offset, q_stride, v + k_offset, kv_stride, grad_probs,
                    keys);
          for (int64_t i = 0; i < queries; ++i) {
            const int64_t from = firsts[start + i] - first, to = start + i + 1 - first;
            const float* g = grad_out + q_offset + i * q_stride;
            const float* o = out + q_offset + i * q_stride;
            float mean = 0;  // of the gradient under the probabilities: sum_j p_j g_j = grad_out . out
#pragma omp simd reduction(+ : mean)
            for (int64_t c = 0; c < head_dim; ++c) mean += g[c] * o[c];
            float* p = probs + i * keys;
            float* gp = grad_probs + i * keys;
            const float log_sum = lse[(b * heads + h) * seq + start + i];
#pragma omp simd
            for (int64_t j = from; j < to; ++j) {
              p[j] = fast_exp(p[j] - log_sum);
              gp[j] = p[j] * (gp[j] - mean) * scale;
            }
            for (float* row : {p, gp}) {
              std::fill(row, row + from, 0.0f);
              std::fill(row + to, row + keys, 0.0f);
            }
          }
          matmul_nn(queries, head_dim, keys, grad_probs, keys, k + k_offset, kv_stride, grad_q + q_offset,
                    q_stride);
          matmul_tn(keys, head_dim, queries, grad_probs, keys, q + q_offset, q_stride, grad_k + k_offset,
                    kv_stride, 1, 1);
          matmul_tn(keys, head_dim, queries, probs, keys, grad_out + q_offset, q_stride, grad_v + k_offset,
                    kv_stride, 1, 1);
        }
      }
    }
  }
}

}  // extern "C"
