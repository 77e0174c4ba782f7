"""The same training as a plain PyTorch loop: what one process under Lightning and the strategy is measured by."""

from itertools import chain, islice, repeat

import torch

from olmoe_lightning.model import Transformer
from olmoe_lightning.model.losses import IGNORE_INDEX
from olmoe_lightning.model.router import Router
from olmoe_lightning.tools.parity import RunRecord, StepRecord
from olmoe_lightning.tools.parity.record import EPS, LEARNING_RATE
from olmoe_lightning.training.lr_schedule import make_lr_schedule


def windows(case):
    """The microbatches of each optimizer step; a window does not reach into the next epoch."""
    size = case.accumulate * case.devices
    starts = range(0, len(case.microbatches), size)
    epoch = [case.microbatches[start : start + size] for start in starts]
    return islice(chain.from_iterable(repeat(epoch)), case.steps)


def plain_loop(case):
    """A record of fp32 training with AdamW; nothing of Lightning, of the module or of the strategy is used."""
    model = Transformer(case.model_config)
    model.init_weights(0)
    named = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        router.selection_bias.copy_(case.initial_bias)
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1 and not n.startswith("embed.")]
    others = [p for n, p in model.named_parameters() if p.ndim == 1 or n.startswith("embed.")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, LEARNING_RATE, betas=(0.9, 0.95), eps=EPS, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, make_lr_schedule("cosine", 1, case.steps + 2, 0.1, 0.2))

    run = RunRecord()
    for window in windows(case):
        optimizer.zero_grad()
        cross_entropy = tokens = counts = 0
        for microbatch in window:
            labels = microbatch["labels"]
            counted = labels != IGNORE_INDEX
            hidden, stats = model(microbatch["input_ids"], None, counted, torch.ones(()))
            losses = model.loss(hidden, labels)
            losses.total.backward()  # sums over tokens
            cross_entropy += losses.cross_entropy_N.sum().item()
            tokens += int(counted.sum())
            counts = counts + stats.counts
        norm = torch.nn.utils.get_total_norm([p.grad.double() for p in model.parameters()]).item() / tokens
        clip = min(1.0, case.clip / (norm + 1e-6)) if case.clip else 1.0
        for parameter in model.parameters():
            parameter.grad *= clip / tokens
        gradients = {name: parameter.grad.clone() for name, parameter in named.items()}
        optimizer.step()
        schedule.step()
        for router, layer_counts in zip(routers, counts, strict=True):
            router.update_selection_bias(layer_counts)
        run.steps.append(StepRecord({"train/loss": cross_entropy / tokens}, norm, counts, gradients, {}, 0))
    run.parameters = {name: parameter.detach().clone() for name, parameter in named.items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        run.state[kind] = {name: optimizer.state[parameter][kind] for name, parameter in named.items()}
    run.biases = {f"model.{name}": buffer.clone() for name, buffer in model.named_buffers()}
    return run
