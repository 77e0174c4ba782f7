"""Routers that will not learn, found before a fit rather than behind it."""

from __future__ import annotations

from torch import nn

from olmoe_lightning.model.router import Router, lacks_gradient

_NAMED = 8


def untrained_routers(module: nn.Module) -> str:
    """A warning that names the routers of this process that a fit would leave as they are; empty if there are none.

    Args:
        module: any, whose routers are built.
    """
    frozen: list[str] = []
    reasons: dict[str, list[str]] = {}
    for name, part in module.named_modules():
        if not isinstance(part, Router):
            continue
        weight = f"{name}.weight" if name else "weight"
        if not part.weight.requires_grad:
            frozen.append(weight)
        elif reason := lacks_gradient(part.config):
            reasons.setdefault(reason, []).append(weight)
    found = [
        f"{_list(names)} will get no gradient: {reason}. Set router_z_loss_coeff or balance_loss_coeff, or choose "
        "weights that depend on the router (normalize_weights=False, a larger top_k); else tokens go to experts as the "
        "initial weights say, and weight decay shrinks them"
        for reason, names in reasons.items()
    ]
    if frozen:
        found.append(f"{_list(frozen)} will not be trained: requires_grad is False")
    return "; ".join(found)


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
