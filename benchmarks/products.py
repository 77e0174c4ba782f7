"""The bare matrix products of a training step, nothing else: how much of the matrix peak a step could reach with them.

python benchmarks/products.py            # the sizes of train_step.py, 16 experts

Each product has operands of its own, as in a real step, and experts get equal shares of the rows. The FLOPs of
attention count as in the model, its time as nothing, like that of the optimizer and of everything elementwise.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from _peak import MatrixPeak
from _timing import paired_ratios, summarize
from torch import Tensor
from train_step import matrix_shapes, model_config, parse_arguments

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.kernels import keep_freed_memory


class Product:
    """``y = x @ w.T`` with both gradients.

    Args:
        rows: of x.
        inner: columns of x.
        columns: rows of w.
    """

    def __init__(self, rows: int, inner: int, columns: int) -> None:
        def matrix(m: int, n: int) -> Tensor:
            return torch.randn(m, n)

        self.x, self.w, self.y = matrix(rows, inner), matrix(columns, inner), matrix(rows, columns)
        self.grad_x, self.grad_w = torch.empty_like(self.x), torch.empty_like(self.w)

    def forward(self) -> None:
        """The product."""
        torch.mm(self.x, self.w.t(), out=self.y)

    def backward(self) -> None:
        """Both gradients."""
        torch.mm(self.y, self.w, out=self.grad_x)
        torch.mm(self.y.t(), self.x, out=self.grad_w)


def step_products(config: ModelConfig, tokens: int) -> list[Product]:
    """All products of a step, in the order of the forward pass."""
    d, hidden, experts = config.d_model, config.expert_hidden, config.num_experts
    rows = tokens * config.top_k // experts
    shapes = []
    for _ in range(config.num_layers):
        shapes += [(tokens, d, config.attention_dim + 2 * config.kv_dim, 1), (tokens, config.attention_dim, d, 1)]
        shapes += [(rows, d, 2 * hidden, experts), (rows, hidden, d, experts)]
    shapes.append((tokens, d, config.vocab_size, 1))
    return [Product(m, k, n) for m, k, n, count in shapes for _ in range(count)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peak-seconds", type=float, default=0.8)
    args = parser.parse_args(arguments)
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    sizes = parse_arguments(["--tokens", str(args.tokens)])
    config = model_config(sizes, args.experts)
    flops = config.flops_per_token(sizes.seq_len) * args.tokens
    peak = MatrixPeak(matrix_shapes(config, args.tokens))
    products = step_products(config, args.tokens)
    rates, peaks = [], []
    for _ in range(args.rounds):
        peaks.append(peak.measure(args.peak_seconds)["flops"])
        start = time.perf_counter()
        for product in products:
            product.forward()
        for product in reversed(products):
            product.backward()
        rates.append(flops / (time.perf_counter() - start))
    share = paired_ratios(rates, peaks)
    print(f"{len(products)} products and their gradients, {args.experts} experts, {args.tokens} tokens, fp32")
    print(f"matrix peak      {summarize(peaks).median / 1e9:6.1f} GFLOP/s")
    print(f"at most          {share.median:6.3f} [{share.q1:.3f} .. {share.q3:.3f}] of it, were everything else free")
    print()
    print(json.dumps({"benchmark": "products", "threads": args.threads, "share_of_peak": share.to_dict()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
