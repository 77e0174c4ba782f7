"""What a module says and has at the start of a fit, compared once with what its first training batch shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from olmoe_lightning.errors import UserError, shortened
from olmoe_lightning.parallel.mesh import Axis
from olmoe_lightning.training.objective import read_output


def refuse_uninitialised(module: nn.Module) -> None:
    """Stop at parameters that get a shape in the first forward pass: nothing can be shared out or sent before.

    Raises:
        UserError: their names.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, value in tensors if isinstance(value, UninitializedParameter | UninitializedBuffer)]
    if lazy:
        raise UserError(
            f"{shortened(lazy, 3)}: lazy modules have no shapes yet; run one forward pass on an example in "
            "configure_model, or give them their sizes"
        )


class FirstBatch:
    """The comparison of one fit.

    Args:
        module: as it is set up.
        trained: the parameters that the optimizer changes.
        axis: all processes.
    """

    def __init__(self, module: nn.Module, trained: Iterable[nn.Parameter], axis: Axis) -> None:
        self._known = {parameter: name for name, parameter in module.named_parameters()}
        self._trained = set(trained)
        self._axis = axis
        self._done = False

    def compare(self, module: nn.Module, output: Any) -> None:
        """``training_step`` has returned; collective the first time, and nothing later.

        Args:
            module: as it is now.
            output: of ``training_step``.

        Raises:
            UserError: something is not as it was declared; the same on all processes.
        """
        if self._done:
            return
        self._done = True
        problem = self._other_parameters(module) or _of_output(output)
        problems = [each for each in self._axis.all_gather_objects(problem) if each]
        if problems:
            raise UserError(f"{type(module).__name__}: {problems[0]}")

    def _other_parameters(self, module: nn.Module) -> str:
        now = {parameter: name for name, parameter in module.named_parameters()}
        new = [name for parameter, name in now.items() if parameter not in self._known]
        gone = [self._known[p] for p in self._trained if p not in now and p in self._known]
        if new:
            return (
                f"{shortened(new, 3)} came into the module after it was set up, so that no optimizer trains "
                "them and processes have different values; build all parameters in __init__ or configure_model"
            )
        if gone:
            return (
                f"{shortened(sorted(gone), 3)} are trained, but are no longer in the module since it was set up; "
                "replace and remove parameters in configure_model"
            )
        return ""


def _of_output(output: Any) -> str:
    try:
        found = read_output(output)
    except UserError as error:
        return str(error)
    if found is None:
        return ""  # Lightning raises, or skips the batch
    tokens = found.num_tokens
    if not bool(torch.isfinite(tokens.double())) or bool(tokens < 0):
        return f"training_step returned num_tokens {tokens.item()}; it must be the number of labels that count"
    return ""
