// Softmax cross entropy of rows of logits, and its gradient in their place: a row stays in the first-level cache
// through all passes.
//
// Letters: N rows, V vocabulary.

#include "common.h"

extern "C" {

// labels [N], ignore_index where nothing is predicted. loss [N] = logsumexp - logit of the label (0 where ignored),
// lse [N]. With_grad: logits become softmax * (1 + 2 * z_coeff * logsumexp) - onehot(label), 0 where ignored.
void cross_entropy_rows(float* logits, const int64_t* labels, int64_t rows, int64_t vocab, int64_t ignore_index,
                        float z_coeff, int with_grad, float* loss, float* lse, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t n = 0; n < rows; ++n) {
    float* row = logits + n * vocab;
    const float top = row_max(row, vocab);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < vocab; ++j) sum += fast_exp(row[j] - top) + (row[j] - row[j]);  // NaN and inf stay visible
    const bool counted = labels[n] != ignore_index;
    const float log_sum = std::log(sum);
    lse[n] = top + log_sum;
    // Of large logits only differences are exact. Volatile: -ffast-math would subtract the logit from the logsumexp.
    const volatile float below = counted ? top - row[labels[n]] : 0.0f;
    loss[n] = counted ? log_sum + below : 0.0f;
    if (!with_grad) continue;
    if (!counted) {
      std::fill_n(row, vocab, 0.0f);
      continue;
    }
    const float scale = (1.0f + 2.0f * z_coeff * lse[n]) / sum;
#pragma omp simd
    for (int64_t j = 0; j < vocab; ++j) row[j] = fast_exp(row[j] - top) * scale;
    row[labels[n]] -= 1.0f;
  }
}

}  // extern "C"
