// The router's rows: softmax, logsumexp, entropy and the sums of the probabilities in one pass over the logits, and the
// gradient of all of them and of the chosen probabilities in one pass over the probabilities.
//
// Letters: T tokens, E experts, K chosen experts, G scopes of T / G consecutive tokens each.

#include <vector>

#include "common.h"

namespace {

// Tokens whose probabilities are summed before they join the sum of their scope: the order of additions, and with it
// the result, does not depend on the number of threads, and long sums lose less to rounding.
constexpr int64_t kBlock = 256;

// Logarithm of the smallest exponential that fast_exp returns.
constexpr float kLeast = -87.0f;

struct RowStats {
  float logsumexp, entropy;
};

// Probabilities of one row. What underflows is an exact zero, so that a certain router has entropy zero.
RowStats softmax_row(const float* logits, int64_t experts, float* probs) {
  const float top = row_max(logits, experts);
  float sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
  for (int64_t e = 0; e < experts; ++e) {
    const float x = logits[e] - top;
    // The difference is NaN when a logit is not finite, which the clamp inside fast_exp would hide.
    const float exponential = fast_exp(x) + (x - x);
    const float p = x < kLeast ? 0.0f : exponential;
    probs[e] = p;
    sum += p;
    dot += p * std::max(x, kLeast);
  }
  const float scale = 1.0f / sum, log_sum = std::log(sum);
#pragma omp simd
  for (int64_t e = 0; e < experts; ++e) probs[e] *= scale;
  return {top + log_sum, log_sum - dot * scale};
}

}  // namespace

extern "C" {

// logits [T, E], mask [T] or null -> probs [T, E], logsumexp [T], entropy [T] in nats; prob_sum [G, E] over the tokens
// of each scope that the mask counts.
void router_rows_forward(const float* logits, const uint8_t* mask, int64_t tokens, int64_t experts, int64_t scopes,
                         float* probs, float* logsumexp, float* entropy, float* prob_sum, int threads) {
  const int64_t per_scope = tokens / scopes, blocks = (per_scope + kBlock - 1) / kBlock;
  std::vector<float> partials(scopes * blocks * experts, 0.0f);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t task = 0; task < scopes * blocks; ++task) {
    const int64_t end = (task / blocks + 1) * per_scope;
    const int64_t first = task / blocks * per_scope + task % blocks * kBlock;
    float* partial = partials.data() + task * experts;
    for (int64_t t = first; t < std::min(first + kBlock, end); ++t) {
      float* row = probs + t * experts;
      const RowStats stats = softmax_row(logits + t * experts, experts, row);
      logsumexp[t] = stats.logsumexp;
      entropy[t] = stats.entropy;
      if (mask && !mask[t]) continue;  // a product with zero would let a padded token's NaN through
#pragma omp simd
      for (int64_t e = 0; e < experts; ++e) partial[e] += row[e];
    }
  }
  std::fill_n(prob_sum, scopes * experts, 0.0f);
  for (int64_t task = 0; task < scopes * blocks; ++task) {
    float* sum = prob_sum + task / blocks * experts;
    for (int64_t e = 0; e < experts; ++e) sum[e] += partials[task * experts + e];
  }
}

// A logit's gradient from those of the chosen probabilities [T, K], of prob_sum [G, E] and of logsumexp [T]:
// p_e * (g_e - sum_i p_i g_i + grad_logsumexp), where g_e is the scope's gradient, for tokens that count, plus the one of
// the choice that took e. The K choices of a token are different experts that exist.
void router_rows_backward(const float* probs, const int64_t* chosen, const uint8_t* mask, const float* grad_chosen,
                          const float* grad_prob_sum, const float* grad_logsumexp, int64_t tokens, int64_t experts,
                          int64_t scopes, int64_t k, float* grad_logits, int threads) {
  const int64_t per_scope = tokens / scopes;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < tokens; ++t) {
    const float* p = probs + t * experts;
    const float* scope = grad_prob_sum + t / per_scope * experts;
    const int64_t* ids = chosen + t * k;
    const float* pull = grad_chosen + t * k;
    float* grad = grad_logits + t * experts;
    const bool counted = !mask || mask[t];
    float dot = 0;
    for (int64_t i = 0; i < k; ++i) dot += p[ids[i]] * pull[i];
    if (counted) {
#pragma omp simd reduction(+ : dot)
      for (int64_t e = 0; e < experts; ++e) dot += p[e] * scope[e];
    }
    const float shift = grad_logsumexp[t] - dot;
    if (counted) {
#pragma omp simd
      for (int64_t e = 0; e < experts; ++e) grad[e] = p[e] * (scope[e] + shift);
    } else {
#pragma omp simd
      for (int64_t e = 0; e < experts; ++e) grad[e] = p[e] * shift;
    }
    // Anew, not added: where p is close to 1 the sums nearly cancel, which has to happen before anything is rounded.
    for (int64_t i = 0; i < k; ++i) {
      grad[ids[i]] = p[ids[i]] * (pull[i] - dot + grad_logsumexp[t] + (counted ? scope[ids[i]] : 0.0f));
    }
  }
}

}  // extern "C"
