"""Plain decoding, vLLM's native DFlash and vllm-dflash in one interleaved run, fixed K.

    scripts/run.sh python benchmarks/side_by_side.py

Three engines live side by side; every round measures each of them once at each concurrency.
Reports medians over the rounds.
"""

import argparse
import json
import os
import statistics
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.progress import track

from vllm_dflash.tools.bench.sides import NO_PLUGIN, PLUGIN, side_environment
from vllm_dflash.tools.console import print_report
from vllm_dflash.tools.engine_process import EngineProcess
from vllm_dflash.tools.prompts import read_prompts
from vllm_dflash.tools.step_times import CONTEXT, DRAFT, PLANNING, TIMED
from vllm_dflash.tools.tables import Table

DEMO = Path(__file__).parent.parent / "models" / "demo"


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, default=DEMO)
    parser.add_argument("--prompts", type=Path, default=DEMO / "held_out.jsonl")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=9)
    # Matrix kernels are prepared when a batch of a new size first comes by.
    parser.add_argument("--warmup-rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("out/side_by_side"))
    arguments = parser.parse_args()
    speculative = {
        "method": "dflash",
        "model": str(arguments.pair / "drafter"),
        "num_speculative_tokens": arguments.draft_tokens,
    }
    engine: dict[str, Any] = {
        "model": str(arguments.pair / "target"),
        "max_model_len": 1024,
        "max_num_seqs": 64,
    }
    engine |= {"disable_log_stats": False, "enable_prefix_caching": False}
    engine |= {"worker_extension_cls": TIMED}
    sides: dict[str, tuple[str, dict[str, Any]]] = {
        "plain": (NO_PLUGIN, {}),
        "native": (NO_PLUGIN, {"speculative_config": speculative}),
        "ours": (PLUGIN, {"speculative_config": speculative | {"draft_length": "fixed"}}),
    }
    prompts = read_prompts(arguments.prompts, 200)
    measured = defaultdict(list)
    with ExitStack() as stack:
        children = {
            side: stack.enter_context(
                EngineProcess(
                    arguments.out / f"{side}.log",
                    environment=side_environment(plugins),
                    **engine,
                    **changes,
                )
            )
            for side, (plugins, changes) in sides.items()
        }
        for side in ("native", "ours"):
            children[side].answers.step_times()
        schedule = [
            (round_number, concurrency)
            for round_number in range(-arguments.warmup_rounds, arguments.rounds)
            for concurrency in arguments.concurrency
        ]
        for round_number, concurrency in track(schedule, "Measuring"):
            count = max(concurrency, 4)
            chosen = [prompts[(round_number * 16 + i) % len(prompts)] for i in range(count)]
            for side, child in children.items():
                before = child.answers.step_times() if side != "plain" else {}
                answers = [
                    child.answers.generate(
                        prompts=chosen[i : i + concurrency],
                        tokens=arguments.tokens,
                        ignore_eos=True,
                    )
                    for i in range(0, count, concurrency)
                ]
                after = child.answers.step_times() if side != "plain" else {}
                spent = {name: after[name] - before[name] for name in after}
                if round_number >= 0:
                    measured[concurrency, side].append(summarise(answers, spent))
    report(measured, arguments)


def summarise(answers: list[dict], spent: dict[str, float]) -> dict[str, float]:
    """One measurement: several batches at the same concurrency; `spent` is of `step_times`."""
    tokens = sum(len(ids) for answer in answers for ids in answer["token_ids"])
    seconds = sum(
        sum(map(len, answer["token_ids"])) / answer["tokens_per_second"] for answer in answers
    )
    counts: defaultdict[str, float] = defaultdict(float)
    for answer in answers:
        for name, value in answer["counts"].items():
            counts[name] += value
    drafting = sum(spent.get(part, 0.0) for part in (DRAFT, CONTEXT, PLANNING))
    return {
        "tokens_per_second": tokens / seconds,
        "acceptance_length": 1 + counts["accepted_tokens"] / max(1, counts["drafts"]),
        "draft_ms": 1000 * drafting / max(1, spent.get("drafts", 0)),
    }


def report(measured: dict, arguments: argparse.Namespace) -> None:
    """Print medians and write everything to JSON."""
    rows = []
    for concurrency in arguments.concurrency:
        plain = measured[concurrency, "plain"]
        for side in ("plain", "native", "ours"):
            rounds = measured[concurrency, side]
            ratios = [
                mine["tokens_per_second"] / base["tokens_per_second"]
                for mine, base in zip(rounds, plain, strict=True)
            ]
            medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
            drafting = side != "plain"
            rows.append(
                [
                    str(concurrency),
                    side,
                    f"{medians['tokens_per_second']:.0f}",
                    f"{statistics.median(ratios):.2f}",
                    f"{medians['acceptance_length']:.2f}" if drafting else "",
                    f"{medians['draft_ms']:.2f}" if drafting else "",
                ]
            )
    title = f"Median of {arguments.rounds} interleaved rounds, K={arguments.draft_tokens}"
    columns = ["concurrency", "side", "tokens/s", "x plain", "acceptance", "draft ms"]
    preloaded = f"LD_PRELOAD: {os.environ.get('LD_PRELOAD') or 'nothing'}"
    print_report([Table(title, columns, rows, words=(1,))], [preloaded])
    record = [
        {"concurrency": concurrency, "side": side, "rounds": rounds}
        for (concurrency, side), rounds in measured.items()
    ]
    (arguments.out / "result.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
