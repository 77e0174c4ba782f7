"""Feed-forward networks: many routed experts as two stacked weights, and the plain one of dense blocks.

R rows, E experts, D model width, H hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from olmoe_lightning.kernels import expert_mlp, swiglu
from olmoe_lightning.model.init import Linear


class Experts(nn.Module):
    """E SwiGLU networks held as 3-D parameters, so that a grouped product serves them all.

    Args:
        num_experts: experts held here.
        d_model: D.
        hidden: H.
    """

    def __init__(self, num_experts: int, d_model: int, hidden: int) -> None:
        super().__init__()
        self.w_gate_up = nn.Parameter(torch.empty(num_experts, 2 * hidden, d_model))
        self.w_down = nn.Parameter(torch.empty(num_experts, d_model, hidden))

    @torch.no_grad()
    def keep(self, first: int, count: int) -> None:
        """Give up all experts but ``count`` from index ``first`` on; before an optimizer knows the parameters."""
        for name in ("w_gate_up", "w_down"):
            whole = getattr(self, name)
            part = nn.Parameter(whole[first : first + count].clone(), requires_grad=whole.requires_grad)
            setattr(self, name, part)

    def forward(self, rows_RD: Tensor, row_weights_R: Tensor, offsets_E: Tensor) -> Tensor:
        """Run each row through its expert and scale it by its weight.

        The weight enters between SwiGLU and the down projection, so that combining is a plain sum on every backend and
        the experts' outputs need not be kept for the weight's gradient.

        Args:
            rows_RD: [R, D], sorted by expert.
            row_weights_R: fp32 [R].
            offsets_E: int32 [E], end of each expert's rows.

        Returns:
            [R, D].
        """
        return expert_mlp(rows_RD, self.w_gate_up, self.w_down, row_weights_R, offsets_E)


class FeedForward(nn.Module):
    """One SwiGLU network: a dense block's, or the shared expert.

    Args:
        d_model: D.
        hidden: H.
    """

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.w_gate_up = Linear(d_model, 2 * hidden, bias=False)
        self.w_down = Linear(hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return self.w_down(swiglu(self.w_gate_up(x)))
