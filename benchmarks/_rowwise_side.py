"""One of the processes that share a layer's experts: times dispatch, experts and combine, forward and backward, apart.

T tokens of a process, K chosen experts, E experts, D model width, H expert width.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from products import Product
from torch import Tensor

from olmoe_lightning.kernels import expert_mlp, keep_freed_memory
from olmoe_lightning.parallel import Axis
from olmoe_lightning.plugins.comm import CommPlugin, CommSpec, make_comm


class RowwiseSide:
    """A layer under one plugin after the other, on the same tokens and the same random choice.

    Args:
        processes: among which the experts are shared.
        tokens: T.
        d_model: D.
        hidden: H.
        experts: E.
        top_k: K.
    """

    def __init__(self, processes: int, tokens: int, d_model: int, hidden: int, experts: int, top_k: int) -> None:
        keep_freed_memory()
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        self._axis = Axis("expert", tuple(range(processes)), rank, dist.group.WORLD)
        self._spec = CommSpec(experts, top_k, d_model, torch.float32, torch.device("cpu"), tokens)
        self._plugins: dict[str, CommPlugin] = {}
        torch.manual_seed(rank)
        self._x = torch.randn(tokens, d_model, requires_grad=True)
        self._ids = torch.rand(tokens, experts).topk(top_k).indices
        self._weights = torch.rand(tokens, top_k, requires_grad=True)
        self._grad = torch.randn(tokens, d_model)
        local = experts // processes
        self._w_gate_up = (torch.randn(local, 2 * hidden, d_model) / d_model**0.5).requires_grad_()
        self._w_down = (torch.randn(local, d_model, hidden) / hidden**0.5).requires_grad_()
        rows = tokens * top_k // local
        self._products = [Product(rows, *shape) for _ in range(local) for shape in ((d_model, 2 * hidden),
                                                                                    (hidden, d_model))]  # fmt: skip

    def layer(self, comm: str, experts: bool = True) -> dict[str, float]:
        """Forward and backward of one layer.

        Args:
            comm: name of the plugin.
            experts: whether the experts compute; else their results are those of before, in memory that is as cold.

        Returns:
            Seconds of each part, from when all processes have come to it.
        """
        if comm not in self._plugins:
            self._plugins[comm] = make_comm(comm, self._axis.size, self._spec.device)
            self._plugins[comm].setup(self._axis, self._spec)
        plugin, seconds = self._plugins[comm], {}

        def timed(name: str, work: Callable[[], Any]) -> Any:
            dist.barrier()
            start = time.perf_counter()
            found = work()
            seconds[name] = time.perf_counter() - start
            return found

        sent = timed("dispatch", lambda: plugin.dispatch(self._x, self._ids, self._weights))
        inputs = [part.detach().requires_grad_() for part in sent[:2]]
        weights = [self._w_gate_up, self._w_down]

        def compute() -> Tensor:
            return expert_mlp(inputs[0], *weights, inputs[1], sent.offsets_E)

        out = timed("experts", compute) if experts else inputs[0] * 0.5
        rows = out.detach().requires_grad_()
        y = timed("combine", lambda: plugin.combine(rows, sent.handle))
        (grad_rows,) = timed("combine backward", lambda: torch.autograd.grad(y, rows, self._grad))
        if experts:
            grads = timed("experts backward", lambda: torch.autograd.grad(out, [*inputs, *weights], grad_rows))
        else:
            grads = [grad_rows * 0.5, inputs[1] * 0.5]
        timed("dispatch backward", lambda: torch.autograd.grad(sent[:2], [self._x, self._weights], grads[:2]))
        return seconds

    def products(self) -> float:
        """Seconds of the bare matrix products of the experts, forward and backward, on equal shares of the rows."""
        dist.barrier()
        start = time.perf_counter()
        for product in self._products:
            product.forward()
        for product in reversed(self._products):
            product.backward()
        return time.perf_counter() - start
