"""What every measured benchmark does around its parts: look at the machine before and after, print table and JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from _machine import LoadWatch, busy_warning, describe, inherited_settings, load_average
from _workers import WorkerError

from olmoe_lightning.config import ModelConfig

Progress = Callable[[str], None]


def sized_model(args: argparse.Namespace, **more: Any) -> ModelConfig:
    """A model of the command line's sizes.

    Args:
        args: ``vocab``, ``d_model``, ``layers``, ``heads``, ``experts``, ``hidden``.
        more: further fields of the configuration, or others than these.

    Raises:
        ValueError: the sizes do not fit together.
    """
    sizes: dict[str, Any] = {
        "vocab_size": args.vocab,
        "d_model": args.d_model,
        "num_layers": args.layers,
        "num_heads": args.heads,
        "num_kv_heads": args.heads,
        "head_dim": args.d_model // args.heads,
        "num_experts": args.experts,
        "expert_hidden": args.hidden,
    }
    return ModelConfig(**(sizes | more))


def run(
    benchmark: str,
    args: argparse.Namespace,
    measure: Callable[[dict[str, Any], Progress], None],
    table: Callable[[dict[str, Any]], str],
) -> int:
    """Measure, and print.

    Args:
        benchmark: its name, for the JSON.
        args: settings; ``json_only`` leaves the table out.
        measure: adds the figures to the results it is given.
        table: the results as text.

    Returns:
        The exit status: 1 if a measured process failed.
    """
    started = time.perf_counter()

    def progress(text: str) -> None:
        print(f"[{time.perf_counter() - started:5.0f} s] {text}", file=sys.stderr, flush=True)

    watch = LoadWatch()
    time.sleep(0.5)
    load, others = load_average(), watch.others()["others"]
    warning = busy_warning(load, others)
    if warning:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    watch = LoadWatch()
    results: dict[str, Any] = {
        "benchmark": benchmark,
        "machine": describe(),
        "settings": vars(args) | {"environment": inherited_settings()},
    }
    try:
        measure(results, progress)
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    results["load"] = {
        "average_before": load,
        "average_after": load_average(),
        "others_before": others,
        **{f"{name}_during": cores for name, cores in watch.others().items()},
        "warning": warning,
    }
    results["seconds"] = time.perf_counter() - started
    if not args.json_only:
        print(table(results))
    print(json.dumps(results))
    return 0
