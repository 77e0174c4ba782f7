// A SwiGLU mixture of experts on the CPU, fp32: each thread takes whole pieces of work (an expert, or a block of its
// rows) and runs the chain product -> SwiGLU -> product on them while they are in its own cache. Compared with one
// product after another over all threads, small products need no barrier each, and the elementwise work between them
// reads what was just written.
//
// Letters: R rows sorted by expert, E experts, D model width, H hidden width. All matrices are row-major and dense.

#include <algorithm>
#include <numeric>
#include <vector>

#include "common.h"

namespace {

// Rows per piece of work: their gate, up and hidden values (3 H floats each) should stay in a core's own cache.
constexpr int64_t kBlock = 512;

void swiglu_row(const float* gate_up, float weight, int64_t hidden, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < hidden; ++i) {
    const float gate = gate_up[i];
    out[i] = gate * sigmoid(gate) * gate_up[hidden + i] * weight;
  }
}

// From the gradient of the (weighted) hidden values: the gradient of gate and up, that of the row's weight (returned),
// and the weighted hidden values themselves, which the down projection's gradient needs and the forward did not keep.
float swiglu_backward_row(const float* gate_up, const float* grad, float weight, int64_t hidden, float* grad_gate_up,
                          float* hidden_out) {
  float grad_weight = 0;
#pragma omp simd reduction(+ : grad_weight)
  for (int64_t i = 0; i < hidden; ++i) {
    const float gate = gate_up[i], up = gate_up[hidden + i], g = grad[i];
    const float s = sigmoid(gate);
    const float silu = gate * s;
    grad_weight += g * silu * up;
    hidden_out[i] = silu * up * weight;
    grad_gate_up[i] = g * weight * up * (s + silu * (1.0f - s));
    grad_gate_up[hidden + i] = g * weight * silu;
  }
  return grad_weight;
}

// Experts by falling size: the largest pieces first leave the smallest for the end, when threads run out of work.
std::vector<int64_t> by_size(const int32_t* offsets, int64_t experts) {
  std::vector<int64_t> order(experts);
  std::iota(order.begin(), order.end(), 0);
  auto size = [&](int64_t e) { return offsets[e] - (e ? offsets[e - 1] : 0); };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return size(a) > size(b); });
  return order;
}

// Zeros for the padding rows behind the last offset, unless `rows` is null.
void zero_tail(float* rows, const int32_t* offsets, int64_t experts, int64_t total_rows, int64_t width) {
  const int64_t end = experts ? offsets[experts - 1] : 0;
  if (rows && end < total_rows) std::memset(rows + end * width, 0, (total_rows - end) * width * sizeof(float));
}

}  // namespace

extern "C" {

// x [R, D], w_gate_up [E, 2H, D], w_down [E, D, H], row_weights [R], offsets [E] -> gate_up [R, 2H], y [R, D]. Rows
// behind the last offset are padding: they are not read, and give zero.
void experts_forward(const float* x, const float* w_gate_up, const float* w_down, const float* row_weights,
                     const int32_t* offsets, int64_t total_rows, int64_t experts, int64_t width, int64_t hidden,
                     float* gate_up, float* y, int threads) {
  struct Piece {
    int64_t expert, start, rows;
  };
  std::vector<Piece> pieces;
  zero_tail(y, offsets, experts, total_rows, width);
  for (int64_t e : by_size(offsets, experts)) {
    for (int64_t start = e ? offsets[e - 1] : 0; start < offsets[e]; start += kBlock) {
      pieces.push_back({e, start, std::min<int64_t>(kBlock, offsets[e] - start)});
    }
  }
#pragma omp parallel num_threads(threads)
  {
    float* gu = scratch<0>(kBlock * 2 * hidden);
    float* h = scratch<1>(kBlock * hidden);
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < pieces.size(); ++i) {
      const auto [e, start, rows] = pieces[i];
      matmul_nt(rows, 2 * hidden, width, x + start * width, w_gate_up + e * 2 * hidden * width, gu);
      for (int64_t r = 0; r < rows; ++r) {
        swiglu_row(gu + r * 2 * hidden, row_weights[start + r], hidden, h + r * hidden);
      }
      // The backward pass needs it, much later.
      stream_copy(gu, rows * 2 * hidden, gate_up + start * 2 * hidden);
      matmul_nt(rows, width, hidden, h, w_down + e * width * hidden, y + start * width);
    }
  }
}

// The gradients of those inputs for which there is a place (the others are null); a thread owns an expert, so that it
// alone adds to that expert's weight gradients. Experts without rows get zero gradients.
void experts_backward(const float* grad_y, const float* x, const float* w_gate_up, const float* w_down,
                      const float* row_weights, const float* gate_up, const int32_t* offsets, int64_t total_rows,
                      int64_t experts, int64_t width, int64_t hidden, float* grad_x, float* grad_w_gate_up,
                      float* grad_w_down, float* grad_row_weights, int threads) {
  const std::vector<int64_t> order = by_size(offsets, experts);
  zero_tail(grad_x, offsets, experts, total_rows, width);
  zero_tail(grad_row_weights, offsets, experts, total_rows, 1);
#pragma omp parallel num_threads(threads)
  {
    float* grad_gu = scratch<0>(kBlock * 2 * hidden);
    float* h = scratch<1>(kBlock * hidden);
    float* grad_h = scratch<2>(kBlock * hidden);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < experts; ++i) {
      const int64_t e = order[i], first = e ? offsets[e - 1] : 0, last = offsets[e];
      float* gw1 = grad_w_gate_up ? grad_w_gate_up + e * 2 * hidden * width : nullptr;
      float* gw2 = grad_w_down ? grad_w_down + e * width * hidden : nullptr;
      if (first == last) {
        if (gw1) std::fill_n(gw1, 2 * hidden * width, 0.0f);
        if (gw2) std::fill_n(gw2, width * hidden, 0.0f);
      }
      for (int64_t start = first; start < last; start += kBlock) {
        const int64_t rows = std::min(kBlock, last - start);
        const float* gy = grad_y + start * width;
        matmul_nn(rows, hidden, width, gy, w_down + e * width * hidden, grad_h);
        for (int64_t r = 0; r < rows; ++r) {
          const float grad_weight =
              swiglu_backward_row(gate_up + (start + r) * 2 * hidden, grad_h + r * hidden,
                                  row_weights[start + r], hidden, grad_gu + r * 2 * hidden, h + r * hidden);
          if (grad_row_weights) grad_row_weights[start + r] = grad_weight;
        }
        if (gw2) matmul_tn(width, hidden, rows, gy, h, gw2, start > first);
        if (grad_x) {
          matmul_nn(rows, width, 2 * hidden, grad_gu, w_gate_up + e * 2 * hidden * width, grad_x + start * width);
        }
        if (gw1) matmul_tn(2 * hidden, width, rows, grad_gu, x + start * width, gw1, start > first);
      }
    }
  }
}

}  // extern "C"
