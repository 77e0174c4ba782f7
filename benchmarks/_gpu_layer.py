"""One MoE layer, forward and backward: over both transports of one process, and as a plain loop over experts.

T tokens, K chosen experts, E experts, D model width, H expert width.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from _gpu_cases import Case, Cases, Row
from _gpu_checks import ROUNDED, Check, Outcome
from _gpu_clock import Work
from torch import Tensor, nn

from olmoe_lightning.config import ModelConfig
from olmoe_lightning.kernels import LocalTransport, Transport
from olmoe_lightning.model.moe import MoE
from olmoe_lightning.parallel import Axis
from olmoe_lightning.plugins.comm import CommSpec, RowwiseComm

TRANSPORTS = ("local", "rowwise")
GOAL = 1.5
"""How many times as fast as the loop."""


class Layer:
    """A layer, its input, and the gradient that comes back.

    Args:
        device: where all that lies.
        dtype: of the weights and rows.
        tokens: T.
        top_k: K.
        experts: E.
        width: D.
        hidden: H.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, tokens: int, top_k: int, experts: int, width: int, hidden: int
    ) -> None:
        config = ModelConfig(
            vocab_size=8, d_model=width, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=width,
            num_experts=experts, top_k=top_k, expert_hidden=hidden, normalize_weights=True,
        )  # fmt: skip
        with device:
            self.moe = MoE(config).to(dtype)
        for parameter in self.moe.parameters():
            nn.init.normal_(parameter, std=width**-0.5)
        self.x = torch.randn(1, tokens, width, device=device, dtype=dtype, requires_grad=True)
        self.grad = torch.randn(1, tokens, width, device=device, dtype=dtype)
        self.spec = CommSpec(experts, top_k, width, dtype, device, tokens)

    def transport(self, name: str) -> Transport:
        """One by name.

        Raises:
            ValueError: it cannot serve this device; the message says why.
        """
        if name == "local":
            return LocalTransport(self.spec.num_experts)
        comm = RowwiseComm()
        comm.setup(Axis("expert", (0,), 0), self.spec)
        return comm

    def step(self, forward: Callable[[MoE, Tensor], Tensor]) -> list[Tensor]:
        """The result, and the gradients of input and weights."""
        leaves = [self.x, *self.moe.parameters()]
        y = forward(self.moe, self.x)
        return [y.detach(), *torch.autograd.grad(y, leaves, self.grad)]

    def ours(self, transport: Transport) -> list[Tensor]:
        """A step over a transport."""
        self.moe.transport = transport
        return self.step(lambda moe, x: moe(x)[0])

    def in_fp32(self) -> Layer:
        """The same layer and operands with more bits; it chooses the same experts, since the router has fp32 anyway."""
        other = copy.copy(self)
        with self.spec.device:
            other.moe = MoE(self.moe.config)
        other.moe.load_state_dict(self.moe.state_dict())
        other.x, other.grad = self.x.detach().float().requires_grad_(), self.grad.float()
        return other


def loop_over_experts(moe: MoE, x_BSD: Tensor) -> Tensor:
    """The layer as most models write it: pick an expert's tokens, compute, add to the result."""
    routing = moe.router(x_BSD)
    x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
    out = torch.zeros_like(x_TD)
    for expert in range(moe.config.num_experts):
        token, choice = torch.where(routing.expert_ids == expert)
        gate, up = F.linear(x_TD[token], moe.experts.w_gate_up[expert]).chunk(2, dim=-1)
        rows = F.linear(F.silu(gate) * up, moe.experts.w_down[expert])
        out = out.index_add(0, token, (rows * routing.weights[token, choice, None]).to(out.dtype))
    return out.view_as(x_BSD)


class Layers:
    """Checks and cases of layers on one device.

    Args:
        cases: knows device, sizes and what was left out.
    """

    def __init__(self, cases: Cases) -> None:
        self.cases = cases

    def checks(self) -> Iterator[Check]:
        """Each transport against the loop in fp32; on GPUs, also that no step waits for the device."""
        for name in TRANSPORTS:
            yield Check(f"MoE layer, {name}, against a loop", functools.partial(self._against_loop, name))
            if self.cases.clock.device.type == "cuda":
                yield Check(f"MoE layer, {name}, never waits for the device", functools.partial(self._residence, name))

    def all(self) -> Iterator[Case]:
        """The layer with each number of tokens."""
        s = self.cases.shapes
        for tokens in s.tokens:
            name = f"MoE layer, {tokens} tokens, top-{s.top_k} of {s.layer_experts}"
            yield Case(name, self._flops(tokens) / 3e14, functools.partial(self._time, name, tokens))

    def one_step(self) -> Work:
        """A step of the largest layer, over the local transport."""
        layer = self._layer(max(self.cases.shapes.tokens))
        transport = layer.transport("local")
        return lambda: layer.ours(transport)

    def _flops(self, tokens: int) -> float:
        s = self.cases.shapes
        return 18.0 * tokens * s.top_k * s.width * s.hidden

    def _layer(self, tokens: int) -> Layer:
        s = self.cases.shapes
        sizes = (tokens, s.top_k, s.layer_experts, s.width, s.hidden)
        return Layer(self.cases.clock.device, self.cases.dtype, *sizes)

    def _against_loop(self, name: str) -> Outcome:
        layer = self._layer(min(self.cases.shapes.tokens))
        found = layer.ours(layer.transport(name))
        wanted = layer.in_fp32().step(loop_over_experts)
        # bf16 rounds what stands between router, three products and the sum over experts, on the way back once more.
        return found, [each.to(self.cases.dtype) for each in wanted], 2**-5

    def _residence(self, name: str) -> Outcome:
        layer = self._layer(min(self.cases.shapes.tokens))
        transport = layer.transport(name)
        wanted = layer.ours(transport)  # compiles, allocates
        torch.cuda.synchronize()
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = layer.ours(transport)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        return found, wanted, ROUNDED[self.cases.dtype]

    def _time(self, name: str, tokens: int) -> list[Row]:
        layer = self._layer(tokens)
        ways: dict[str, Work] = {}
        for each in TRANSPORTS:
            try:
                transport = layer.transport(each)
            except ValueError as error:
                self.cases.left_out.append(f"{name}: {each} does not run: {error}")
                continue
            ways[each] = functools.partial(layer.ours, transport)
        goals = dict.fromkeys(ways, GOAL)
        ways["loop over experts"] = lambda: layer.step(loop_over_experts)
        flops = dict.fromkeys(ways, self._flops(tokens))
        return self.cases.report(name, ways, flops, "TFLOP/s", "loop over experts", goals)
