"""The figures of ``train_step.py`` as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(results: dict[str, Any]) -> str:
    """Everything that was measured, one block for each part."""
    machine, settings, load = results["machine"], results["settings"], results["load"]
    environment = " ".join(f"{name}={value}" for name, value in settings["environment"].items()) or "nothing set"
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores; Python {machine['python']}, torch {machine['torch']}, "
        f"lightning {machine['lightning']}, transformers {machine['transformers']}",
        f"d_model {settings['d_model']}, {settings['layers']} layers, {settings['heads']} heads, "
        f"expert width {settings['hidden']}, top-{settings['top_k']}, vocabulary {settings['vocab']}, "
        f"sequence {settings['seq_len']}, {settings['tokens']} tokens a step, fp32, {settings['threads']} threads, "
        f"fused AdamW, compile_blocks={settings['compile']}",
        f"all processes: OMP_NUM_THREADS=MKL_NUM_THREADS={settings['threads']}; inherited: {environment}; "
        f"freed memory is kept{' by ours only' if settings['peer_default_malloc'] else ''}",
        f"load average {_number(load['average_before'])} before, {_number(load['average_after'])} after; "
        f"meanwhile others kept {_number(load['others_during'])} cores busy and the host took "
        f"{_number(load['steal_during'])}",
    ]
    if load["warning"]:
        lines.append(f"WARNING: {load['warning']}")
    if "peer" in results:
        lines += ["", *_peer(results["peer"])]
    if "scaling" in results:
        lines += ["", *_scaling(results["scaling"])]
    if "overhead" in results:
        lines += ["", *_overhead(results["overhead"])]
    return "\n".join([*lines, "", f"median [quartiles] over the rounds; {results['seconds']:.0f} s in all", ""])


def _peer(parts: list[dict[str, Any]]) -> list[str]:
    rows = [("experts", "side", "tokens/s", "model GFLOP/s", "of the peak", "ours is faster by")]
    notes = []
    for part in parts:
        choice = part["experts_implementation"]
        for name, side in part["sides"].items():
            label = name if name == "ours" else name.replace("transformers", f"transformers {choice['chosen']}")
            ratio = f"{spread(side['ours_over_it'], 3)}x" if "ours_over_it" in side else ""
            rows.append(
                (
                    str(part["experts"]),
                    label,
                    spread(side["tokens_per_s"], 0),
                    spread(side["model_gflops"], 1),
                    spread(side["of_peak"], 3),
                    ratio,
                )
            )
        tried = ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in choice["seconds"].items())
        losses = ", ".join(f"{name} {loss:.3f}" for name, loss in part["loss"].items())
        notes += [
            f"{part['experts']} experts: peak {spread(part['peak']['gflops'], 1)} GFLOP/s, "
            f"best at {part['peak']['shape']} "
            f"(against the run's best, ours reaches {part['sides']['ours']['of_best_peak']:.3f}); "
            f"{part['rounds']} rounds of {part['steps']} steps; last losses: {losses}; "
            f"CPU taken while waiting {part['idle_cpu_s']:.2f} s",
            f"{part['experts']} experts: transformers tried {tried}"
            + "".join(f"; {name} left out: {why}" for name, why in choice["left_out"].items()),
        ]
    return ["Against transformers' OlmoeForCausalLM", *aligned(rows), *notes]


def _scaling(part: dict[str, Any]) -> list[str]:
    rows = [("experts", "tokens/s", f"relative to {part['by_experts'][0]['experts']}")]
    for row in part["by_experts"]:
        rows.append((str(row["experts"]), spread(row["tokens_per_s"], 0), spread(row["relative"], 3)))
    title = (
        f"More experts, {part['tokens_per_optimizer_step']} tokens per optimizer step "
        f"({part['microbatches']} microbatches, {part['rounds']} rounds of {part['steps']})"
    )
    return [title, *aligned(rows)]


def _overhead(part: dict[str, Any]) -> list[str]:
    names = {"bare": "bare loop", "trainer": "Trainer", "trainer_bar": "Trainer with progress bar"}
    rows = [("", "ms a step", "overhead %")]
    for way, name in names.items():
        overhead = part.get(f"{way}_overhead_percent")
        rows.append((name, spread(part["step_ms"][way], 1), spread(overhead, 2) if overhead else ""))
    title = f"Trainer, {part['experts']} experts ({part['rounds']} rounds of {part['steps']} steps)"
    return [title, *aligned(rows)]


def spread(summary: dict[str, Any], digits: int) -> str:
    """Median and quartiles."""
    median, q1, q3 = (f"{summary[name]:,.{digits}f}" for name in ("median", "q1", "q3"))
    return f"{median} [{q1} .. {q3}]"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns padded to their widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
