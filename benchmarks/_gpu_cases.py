"""What is timed, kernel by kernel, each beside the libraries' way and beside what the device could do at best.

R rows, E experts, N output width, K input width or chosen experts, T tokens, D model width, H expert width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from _gpu_checks import plain_swiglu, triton_grouped_mm
from _gpu_clock import Clock, Race, Work
from torch import Tensor

from olmoe_lightning.kernels import combine_rows, dispatch_rows, grouped_mm, plan_permutation, rowwise, swiglu
from olmoe_lightning.kernels.routes import Window


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        case: what was computed, on which sizes.
        way: how.
        seconds: median, quartiles and extremes of the repetitions.
        rate: per second, in ``unit``.
        unit: ``TFLOP/s``, ``GB/s``, or millions of routes, ``M/s``.
        relative: rate over that of ``over``, the median of paired repetitions; ``None`` for ``over`` itself.
        over: the way it is compared with.
        goal: what ``relative`` should reach; ``None`` where there is no goal.
    """

    case: str
    way: str
    seconds: dict[str, float]
    rate: float
    unit: str
    relative: float | None = None
    over: str = ""
    goal: float | None = None


@dataclass(frozen=True)
class Case:
    """Something to time.

    Args:
        name: with its sizes.
        estimate: seconds that one repetition may take on a large GPU; cases with large ones come last.
        run: makes the operands and times them.
    """

    name: str
    estimate: float
    run: Callable[[], list[Row]]


@dataclass(frozen=True)
class Shapes:
    """Sizes of all cases.

    Args:
        experts: E, of the grouped products.
        rows: mean rows of an expert there.
        width: K and N there, D elsewhere.
        hidden: H.
        tokens: T, each of them.
        top_k: K.
        layer_experts: E elsewhere.
    """

    experts: tuple[int, ...] = (8, 64, 128)
    rows: tuple[int, ...] = (64, 256, 1024, 4096)
    width: int = 2048
    hidden: int = 1024
    tokens: tuple[int, ...] = (2048, 8192)
    top_k: int = 8
    layer_experts: int = 64


OLMOE = Shapes()
"""A layer of OLMoE-1B-7B."""
TINY = Shapes((4,), (4,), 16, 8, (8,), 2, 4)


@dataclass
class Cases:
    """Makes cases for one device.

    Args:
        clock: of the device.
        shapes: of the operands.
        triton: whether Triton's kernels can run there.
        dtype: of rows and weights.
        left_out: why a way could not run, by case and way; filled while cases run.
    """

    clock: Clock
    shapes: Shapes
    triton: bool
    dtype: torch.dtype = torch.bfloat16
    left_out: list[str] = field(default_factory=list)

    def all(self) -> Iterator[Case]:
        """Every case; operands are made when it runs."""
        s = self.shapes
        for experts in s.experts:
            for rows in s.rows:
                name = f"grouped product, {experts} experts, {rows} rows each"
                flops = 2 * experts * rows * s.width**2
                yield Case(name, 3 * flops / 5e14, functools.partial(self.products, name, experts, rows))
        for tokens in s.tokens:
            moved = tokens * s.top_k * s.width * self.dtype.itemsize
            for title, run in (("rows", self.rows), ("swiglu", self.swiglu)):
                name = f"{title}, {tokens} tokens, top-{s.top_k}"
                yield Case(name, 4 * moved / 3e12, functools.partial(run, name, tokens))

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal values: constants would draw less power and make the clock of a GPU higher."""
        return torch.randn(*shape, dtype=dtype or self.dtype, device=self.clock.device)

    def race(self, case: str, ways: dict[str, Work]) -> Race:
        """Times those that run, and remembers why others do not."""
        able = {}
        for way, work in ways.items():
            try:
                work()
                able[way] = work
            except (RuntimeError, NotImplementedError) as error:
                if "out of memory" in str(error) or "illegal" in str(error):
                    raise
                self.left_out.append(f"{case}: {way} does not run: {str(error).splitlines()[0][:160]}")
        return self.clock.race(able)

    def report(
        self, case: str, ways: dict[str, Work], work: dict[str, float], unit: str, over: str, goals: dict[str, float]
    ) -> list[Row]:
        """Rows of one race.

        Args:
            case: its name.
            ways: what does it.
            work: how much each way does, in FLOPs, bytes or routes.
            unit: of the rate.
            over: the way that the others are compared with.
            goals: of the ratios.
        """
        race, scale = self.race(case, ways), {"TFLOP/s": 1e12, "GB/s": 1e9, "M/s": 1e6}[unit]
        rows = []
        for way, summary in race.seconds.items():
            seconds = {name: getattr(summary, name) for name in ("median", "q1", "q3", "low", "high")}
            rate = work[way] / summary.median / scale
            if way == over:
                rows.append(Row(case, way, seconds, rate, unit))
                continue
            relative = race.faster(way, over) * work[way] / work[over]
            goal = goals.get(way) if self.clock.device.type == "cuda" else None
            rows.append(Row(case, way, seconds, rate, unit, relative, over, goal))
        return rows

    def products(self, name: str, experts: int, rows: int) -> list[Row]:
        """Forward, gradient of x, gradient of w; the dense product has as many rows and one weight."""
        device, width = self.clock.device, self.shapes.width
        total = experts * rows
        # As a router without favourites would choose: some experts get more, some less.
        chosen = torch.randint(experts, (total,), device=device)
        sizes = torch.bincount(chosen, minlength=experts)
        offsets = sizes.cumsum(0).to(torch.int32)
        host = sizes.tolist()
        x, grad = self.randn(total, width), self.randn(total, width)
        w = self.randn(experts, width, width) / width**0.5
        ops = torch.ops.olmoe_lightning
        grad_w = torch.empty_like(w)

        def loop(rows_of: Tensor, weights: Tensor) -> Tensor:
            pieces = zip(rows_of.split(host), weights, strict=True)
            return torch.cat([each @ weight for each, weight in pieces])

        def loop_w() -> None:
            for piece, x_e, out in zip(grad.split(host), x.split(host), grad_w, strict=True):
                torch.mm(piece.t(), x_e, out=out)

        by_kind: dict[str, dict[str, Work]] = {
            "forward": {
                "ours": lambda: grouped_mm(x, w, offsets),
                "F.grouped_mm": lambda: F.grouped_mm(x, w.transpose(1, 2), offs=offsets),
                "loop": lambda: loop(x, w.transpose(1, 2)),
                "cuBLAS, dense": lambda: x @ w[0].t(),
            },
            "gradient of x": {
                "ours": lambda: ops.grouped_mm_grad_x(grad, w, offsets),
                "F.grouped_mm": lambda: F.grouped_mm(grad, w, offs=offsets),
                "loop": lambda: loop(grad, w),
                "cuBLAS, dense": lambda: grad @ w[0],
            },
            "gradient of w": {
                "ours": lambda: ops.grouped_mm_grad_w(grad, x, offsets),
                "F.grouped_mm": lambda: F.grouped_mm(grad.t(), x, offs=offsets),
                "loop": loop_w,
                "cuBLAS, dense": lambda: grad.t() @ x,
            },
        }
        if self.triton:
            from olmoe_lightning.kernels.gpu import grouped_mm as triton

            by_kind["forward"]["Triton"] = lambda: triton_grouped_mm(x, w, offsets)
            by_kind["gradient of x"]["Triton"] = lambda: triton.product(grad, w, offsets)
            by_kind["gradient of w"]["Triton"] = lambda: triton.grad_w(grad, x, offsets)
        goals = {"ours": 0.9} if rows >= 256 else {}
        found = []
        with torch.no_grad():
            for kind, ways in by_kind.items():
                flops = dict.fromkeys(ways, 2.0 * total * width**2)
                found += self.report(f"{name}: {kind}", ways, flops, "TFLOP/s", "cuBLAS, dense", goals)
        return found

    def rows(self, name: str, tokens: int) -> list[Row]:
        """Bytes are what must be read and written at least once; a copy of all rows says what memory can do."""
        s, device = self.shapes, self.clock.device
        ids = torch.rand(tokens, s.layer_experts, device=device).topk(s.top_k).indices
        x, weights = self.randn(tokens, s.width), torch.rand(tokens, s.top_k, device=device)
        total = ids.numel()
        counts = rowwise.count_routes(ids, None, s.layer_experts)[None]
        routes, _, _ = rowwise.plan_routes(ids, None, counts, 0)
        window = Window(self.randn(total + 1, s.width), torch.rand(total + 1, device=device))
        plan = plan_permutation(ids, s.layer_experts)
        rows, other = self.randn(total, s.width), self.randn(total, s.width)
        copy: dict[str, Work] = {"copy": lambda: other.copy_(rows)}
        each = s.width * self.dtype.itemsize
        moved = float((total + tokens) * each)

        def work(ways: dict[str, Work]) -> dict[str, float]:
            return dict.fromkeys(ways, moved) | {"copy": 2.0 * total * each}

        out: dict[str, Work] = {
            "rowwise": lambda: rowwise.put_rows(x, weights, routes, [window]),
            "local": lambda: dispatch_rows(x, plan),
            "index_select": lambda: x.index_select(0, plan.token_of_row_R),
        } | copy
        home: dict[str, Work] = {
            "rowwise": lambda: rowwise.sum_rows([window.rows], routes),
            "local": lambda: combine_rows(rows, plan),
            "index_select, sum": lambda: (
                rows.index_select(0, plan.row_of_route_TK.view(-1)).view(tokens, s.top_k, s.width).sum(1)
            ),
        } | copy
        planning: dict[str, Work] = {
            "rowwise": lambda: rowwise.plan_routes(ids, None, counts, 0),
            "local": lambda: plan_permutation(ids, s.layer_experts),
            "argsort": lambda: torch.argsort(ids.view(-1), stable=True),
        }
        goals = {"rowwise": 0.8, "local": 0.8}
        with torch.no_grad():
            return [
                *self.report(f"{name}: dispatch", out, work(out), "GB/s", "copy", goals),
                *self.report(f"{name}: combine", home, work(home), "GB/s", "copy", goals),
                *self.report(f"{name}: plan", planning, dict.fromkeys(planning, float(total)), "M/s", "argsort", {}),
            ]

    def swiglu(self, name: str, tokens: int) -> list[Row]:
        """With row weights; as many rows as there are routes."""
        s = self.shapes
        total, item = tokens * s.top_k, self.dtype.itemsize
        gate_up = self.randn(total, 2 * s.hidden).requires_grad_()
        weights = torch.rand(total, device=self.clock.device).requires_grad_()
        grad = self.randn(total, s.hidden)
        results = {"ours": swiglu(gate_up, weights), "eager": plain_swiglu(gate_up, weights)}

        def forward(function: Callable[..., Tensor]) -> Any:
            with torch.no_grad():
                return function(gate_up, weights)

        def backward(way: str) -> Any:
            return torch.autograd.grad(results[way], [gate_up, weights], grad, retain_graph=True)

        ways: dict[str, Work] = {"ours": lambda: forward(swiglu), "eager": lambda: forward(plain_swiglu)}
        back: dict[str, Work] = {way: functools.partial(backward, way) for way in results}
        values = float(total * s.hidden * item)
        return [
            *self.report(f"{name}: forward", ways, dict.fromkeys(ways, 3 * values), "GB/s", "eager", {}),
            *self.report(f"{name}: backward", back, dict.fromkeys(back, 5 * values), "GB/s", "eager", {}),
        ]
