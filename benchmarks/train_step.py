"""How fast a training step is: against transformers, against the machine, with more experts, and inside the Trainer.

Prints a table and, last, one line of JSON. What the numbers mean is in ``docs/performance.md``.

    python benchmarks/train_step.py                    # everything, about six minutes on two cores
    python benchmarks/train_step.py --part peer        # one part
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import Any

from _report import table
from _run import Progress, run, sized_model
from _timing import paired_ratios, summarize, turn_order
from _workers import Worker, WorkerError

from olmoe_lightning.config import ModelConfig

PARTS = ("peer", "scaling", "overhead")
ROUNDS = {"peer": 6, "scaling": 4, "overhead": 4}
STEPS = {"peer": 5, "scaling": 1, "overhead": 20}
WARMUP_STEPS = 3


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: it is wrong; the message has the numbers.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=("all", *PARTS), default="all")
    parser.add_argument("--rounds", type=int, help=f"rounds of each part (default: {_defaults(ROUNDS)})")
    parser.add_argument("--steps", type=int, help=f"timed steps of a turn (default: {_defaults(STEPS)})")
    parser.add_argument(
        "--experts", type=_integers, default=[16, 128], help="counts of 'peer'; the first is that of 'overhead'"
    )
    parser.add_argument("--scaling-experts", type=_integers, default=[8, 32, 128], help="counts of 'scaling'")
    parser.add_argument("--scaling-tokens", type=int, default=32768, help="tokens of an optimizer step in 'scaling'")
    parser.add_argument("--micro-tokens", type=int, help="tokens of a microbatch in 'scaling' (default: all)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False, help="OLMoE(compile_blocks)")
    parser.add_argument("--peer-compile", action="store_true", help="also run transformers under torch.compile")
    parser.add_argument(
        "--peer-default-malloc",
        action="store_true",
        help="leave transformers the C library's habit of returning freed memory, which OLMoE changes",
    )
    parser.add_argument("--peak-seconds", type=float, default=0.8, help="time for the machine's peak in each round")
    parser.add_argument("--json-only", action="store_true", help="print the line of JSON without the table")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--d-model", type=int, default=256)
    sizes.add_argument("--layers", type=int, default=4)
    sizes.add_argument("--heads", type=int, default=4)
    sizes.add_argument("--hidden", type=int, default=256, help="width of an expert")
    sizes.add_argument("--top-k", type=int, default=4)
    sizes.add_argument("--vocab", type=int, default=2048)
    sizes.add_argument("--seq-len", type=int, default=256)
    sizes.add_argument("--tokens", type=int, default=2048, help="tokens of a step")
    args = parser.parse_args(arguments)
    args.micro_tokens = args.micro_tokens or args.scaling_tokens
    for name in ("rounds", "steps", "threads", "tokens", "scaling_tokens", "micro_tokens", "seq_len"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} ({value}) must be at least 1")
    for large, small in (("tokens", "seq_len"), ("micro_tokens", "seq_len"), ("scaling_tokens", "micro_tokens")):
        if getattr(args, large) % getattr(args, small):
            options = (f"--{name.replace('_', '-')} ({getattr(args, name)})" for name in (large, small))
            parser.error(" must be a multiple of ".join(options))
    try:
        for count in (*args.experts, *args.scaling_experts):
            model_config(args, count)
    except ValueError as error:
        parser.error(str(error))
    return args


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _defaults(values: dict[str, int]) -> str:
    return ", ".join(f"{part} {value}" for part, value in values.items())


def model_config(args: argparse.Namespace, num_experts: int) -> ModelConfig:
    """The benchmark's model: OLMoE's options at the sizes of the command line."""
    return sized_model(args, num_experts=num_experts, top_k=args.top_k, max_seq_len=args.seq_len)


def matrix_shapes(config: ModelConfig, tokens: int) -> list[tuple[int, int, int]]:
    """(rows, inner, columns) of the products whose best rate is the machine's peak: square ones and the model's own."""
    d, rows_per_expert = config.d_model, max(1, tokens * config.top_k // config.num_experts)
    return [
        *((size, size, size) for size in (512, 1024, 2048)),
        (tokens, d, config.attention_dim + 2 * config.kv_dim),
        (tokens, d, config.vocab_size),
        (rows_per_expert, d, 2 * config.expert_hidden),
        (rows_per_expert, config.expert_hidden, d),
    ]


def run_peer(args: argparse.Namespace, num_experts: int, progress: Progress) -> dict[str, Any]:
    """Ours and transformers in turn, and the machine's peak between their turns."""
    config = model_config(args, num_experts)
    common = {"config": config.to_dict(), "seq_len": args.seq_len, "tokens": args.tokens}
    rounds, steps = args.rounds or ROUNDS["peer"], args.steps or STEPS["peer"]
    with ExitStack() as stack:

        def worker(kind: str, **options: Any) -> Worker:
            return stack.enter_context(Worker(kind, args.threads, **options))

        sides = {"ours": worker("ours", **common, compile_blocks=args.compile)}
        peer = {**common, "keep_memory": not args.peer_default_malloc}
        sides["transformers"] = worker("peer", **peer, compile_model=False)
        peak = worker("peak", shapes=matrix_shapes(config, args.tokens))
        progress(f"{num_experts} experts: warm-up, and which way of transformers is the fastest")
        loss = {"ours": sides["ours"].ask("steps", count=WARMUP_STEPS)["loss"]}
        choice = sides["transformers"].ask("choose", steps=4)
        peak.ask("measure", seconds=0.1 * args.peak_seconds)
        if args.peer_compile:
            compiled = worker("peer", **peer, compile_model=True)
            try:
                progress(f"{num_experts} experts: transformers compiles")
                compiled.ask("use", implementation=choice["chosen"])
                compiled.ask("steps", count=WARMUP_STEPS)
                sides["transformers compiled"] = compiled
            except WorkerError as error:
                choice["left_out"]["compiled"] = str(error)

        speeds: dict[str, list[float]] = {name: [] for name in sides}
        peaks: list[dict[str, Any]] = []
        for index in range(rounds):
            progress(f"{num_experts} experts: round {index + 1} of {rounds}")
            first, *others = turn_order(list(sides), index)
            for name in (first, None, *others):
                if name is None:
                    peaks.append(peak.ask("measure", seconds=args.peak_seconds))
                    continue
                turn = sides[name].ask("steps", count=steps, warmup=1)
                speeds[name].append(steps * args.tokens / sum(turn["seconds"]))
                loss[name] = turn["loss"]
        idle = max(side.idle_cpu_s for side in sides.values())
    return {
        "experts": num_experts,
        "rounds": rounds,
        "steps": steps,
        "loss": loss,
        "idle_cpu_s": idle,
        **peer_figures(speeds, peaks, config.flops_per_token(args.seq_len)),
        "experts_implementation": choice,
    }


def peer_figures(speeds: dict[str, list[float]], peaks: list[dict[str, Any]], flops_per_token: float) -> dict[str, Any]:
    """Medians, ratios of pairs, and shares of the peak of the same round.

    Args:
        speeds: tokens per second of each side in each round; ``ours`` is the one the others are compared with.
        peaks: of each round, as ``MatrixPeak.measure`` returns them.
        flops_per_token: model FLOPs.
    """
    peak_flops = [peak["flops"] for peak in peaks]
    best = max(peaks, key=lambda peak: peak["flops"])
    sides = {}
    for name, speed in speeds.items():
        flops = [tokens * flops_per_token for tokens in speed]
        sides[name] = {
            "tokens_per_s": summarize(speed).to_dict(),
            "model_gflops": summarize([value / 1e9 for value in flops]).to_dict(),
            "of_peak": paired_ratios(flops, peak_flops).to_dict(),
            "of_best_peak": summarize(flops).median / best["flops"],
        }
        if name != "ours":
            sides[name]["ours_over_it"] = paired_ratios(speeds["ours"], speed).to_dict()
    return {
        "flops_per_token": flops_per_token,
        "peak": {"gflops": summarize([value / 1e9 for value in peak_flops]).to_dict(), "shape": best["shape"]},
        "sides": sides,
    }


def run_scaling(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Ours with few and many experts in turn, gradients accumulated over microbatches as in training."""
    rounds, steps = args.rounds or ROUNDS["scaling"], args.steps or STEPS["scaling"]
    microbatches = args.scaling_tokens // args.micro_tokens
    speeds: dict[int, list[float]] = {count: [] for count in args.scaling_experts}
    with ExitStack() as stack:
        workers = {
            count: stack.enter_context(
                Worker(
                    "ours",
                    args.threads,
                    config=model_config(args, count).to_dict(),
                    seq_len=args.seq_len,
                    tokens=args.micro_tokens,
                    compile_blocks=args.compile,
                )
            )
            for count in speeds
        }
        for count, worker in workers.items():
            progress(f"scaling: warm-up with {count} experts")
            worker.ask("steps", count=2, microbatches=min(2, microbatches))
        for index in range(rounds):
            for count in turn_order(list(workers), index):
                progress(f"scaling: round {index + 1} of {rounds}, {count} experts")
                seconds = workers[count].ask("steps", count=steps, microbatches=microbatches)["seconds"]
                speeds[count].append(steps * args.scaling_tokens / sum(seconds))
    return {
        "tokens_per_optimizer_step": args.scaling_tokens,
        "microbatches": microbatches,
        "rounds": rounds,
        "steps": steps,
        **scaling_figures(speeds),
    }


def scaling_figures(speeds: dict[int, list[float]]) -> dict[str, Any]:
    """Tokens per second by expert count, and relative to the first count, round by round."""
    reference = next(iter(speeds.values()))
    return {
        "by_experts": [
            {
                "experts": count,
                "tokens_per_s": summarize(speed).to_dict(),
                "relative": paired_ratios(speed, reference).to_dict(),
            }
            for count, speed in speeds.items()
        ]
    }


def run_overhead(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Short fits by the Trainer, with and without the progress bar, and by a bare loop, in turn."""
    rounds, steps = args.rounds or ROUNDS["overhead"], args.steps or STEPS["overhead"]
    config = model_config(args, args.experts[0])
    seconds: dict[str, list[float]] = {"bare": [], "trainer": [], "trainer_bar": []}
    options = {"config": config.to_dict(), "seq_len": args.seq_len, "tokens": args.tokens}
    with Worker("trainer", args.threads, **options, compile_blocks=args.compile) as worker:
        for way in seconds:
            progress(f"overhead: warm-up of {way}")
            worker.ask("measure", way=way, count=1, warmup=2)
        for index in range(rounds):
            for way in turn_order(list(seconds), index):
                progress(f"overhead: round {index + 1} of {rounds}, {way}")
                gaps = worker.ask("measure", way=way, count=steps, warmup=WARMUP_STEPS)
                seconds[way].append(sum(gaps) / len(gaps))
    return {"experts": config.num_experts, "rounds": rounds, "steps": steps, **overhead_figures(seconds)}


def overhead_figures(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Mean step of each way, and the Trainer's surplus over the bare loop in percent, round by round."""
    figures: dict[str, Any] = {
        "step_ms": {way: summarize([1000 * value for value in values]).to_dict() for way, values in seconds.items()}
    }
    for way in ("trainer", "trainer_bar"):
        ratios = paired_ratios(seconds[way], seconds["bare"])
        figures[f"{way}_overhead_percent"] = summarize([100 * (ratio - 1) for ratio in ratios.rounds]).to_dict()
    return figures


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that were asked for, and print the figures."""
    args = parse_arguments(arguments)
    parts = PARTS if args.part == "all" else (args.part,)

    def measure(results: dict[str, Any], progress: Progress) -> None:
        if "peer" in parts:
            results["peer"] = [run_peer(args, count, progress) for count in args.experts]
        if "scaling" in parts:
            results["scaling"] = run_scaling(args, progress)
        if "overhead" in parts:
            results["overhead"] = run_overhead(args, progress)

    return run("train_step", args, measure, table)


if __name__ == "__main__":
    sys.exit(main())
