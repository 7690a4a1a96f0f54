"""What planning costs: its share of the time, and a load that is never drafted against plain.

    scripts/run.sh python benchmarks/planning_cost.py

Two engines of the demo pair run side by side, widened to 203 M parameters: plain decoding, and
ours. For each number of requests, every round measures plain decoding, ours as it is, and ours
with a planner that plans every step but never drafts.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from types import MethodType
from typing import Any

from rich.progress import track

from loads.answers import importing_benchmarks
from vllm_dflash.tools.bench.bench_pair import widened_demo
from vllm_dflash.tools.bench.sides import NO_PLUGIN, PLUGIN, side_environment
from vllm_dflash.tools.console import print_report
from vllm_dflash.tools.engine_answers import EngineAnswers
from vllm_dflash.tools.engine_process import EngineProcess
from vllm_dflash.tools.prompts import read_prompts
from vllm_dflash.tools.tables import Table

DEMO = Path(__file__).parents[1] / "models" / "demo"
SIDES = ("plain", "ours", "never")


class Switch:
    """In our worker: turns drafting off, but not planning."""

    drafter: Any

    def let_draft(self, allowed: bool) -> None:
        """Follow plans, or plan without drafting."""
        from vllm_dflash.planning.planner import Planner
        from vllm_dflash.planning.step import Plan, StepRecord

        def plan_for_nothing(planner: Planner, step: StepRecord) -> Plan:
            Planner.plan(planner, step)
            return Plan.without_block(step.num_requests, holds_for=7)

        planner = self.drafter.host.policy
        planner.plan = MethodType(Planner.plan if allowed else plan_for_nothing, planner)


class SwitchedAnswers(EngineAnswers):
    """Answers of an engine whose drafting can be turned off."""

    def let_draft(self, allowed: bool) -> None:
        """Tell all workers."""
        self._engine.collective_rpc("let_draft", args=(allowed,))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=Path("out/planning_cost"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    pair = widened_demo(DEMO, arguments.out)
    prompts = read_prompts(DEMO / "held_out.jsonl")
    engine: dict[str, Any] = {
        "model": pair.target,
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "enable_prefix_caching": False,
    }
    path = importing_benchmarks()
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    shares: dict[tuple[str, int], list[float]] = defaultdict(list)
    with ExitStack() as stack:
        plain = stack.enter_context(
            EngineProcess(
                arguments.out / "plain.log",
                environment=side_environment(NO_PLUGIN),
                speculative_config=None,
                **engine,
            )
        )
        plain.answers.facts()  # wait, because both engines compile the same code
        ours = stack.enter_context(
            EngineProcess(
                arguments.out / "ours.log",
                start="planning_cost:SwitchedAnswers.start",
                environment=side_environment(PLUGIN) | path,
                speculative_config={"method": "dflash", "model": pair.drafter},
                worker_extension_cls="planning_cost.Switch",
                **engine,
            )
        )
        for number in track(range(-1, arguments.rounds), "Measuring"):  # one to warm up
            for count in arguments.concurrency:
                turn = number % len(SIDES)
                for side in SIDES[turn:] + SIDES[:turn]:
                    child = plain if side == "plain" else ours
                    if side != "plain":
                        child.ask("let_draft", allowed=side == "ours")
                        before = child.answers.dflash_stats()[0]
                    load: dict[str, Any] = {"tokens": 192, "seconds": arguments.seconds}
                    result = child.answers.closed(prompts=prompts, concurrency=count, **load)
                    if number < 0:
                        continue
                    rates[side, count].append(result["tokens_per_second"])
                    if side != "plain":
                        after = child.answers.dflash_stats()[0]
                        planning, steps = (
                            after[name] - before[name]
                            for name in ("planning_seconds", "step_seconds")
                        )
                        shares[side, count].append(planning / steps)

    def against_plain(side: str, count: int) -> str:
        ratios = [
            ours / plain
            for ours, plain in zip(rates[side, count], rates["plain", count], strict=True)
        ]
        return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})"

    def share(side: str, count: int) -> str:
        return f"{100 * statistics.median(shares[side, count]):.2f}%"

    rows = [
        [str(count), *(cell(side, count) for cell in (against_plain, share) for side in SIDES[1:])]
        for count in arguments.concurrency
    ]
    columns = ["requests", "ours / plain", "never drafting / plain"]
    columns += ["planning, as it is", "planning, never drafting"]
    print_report([Table("What planning costs", columns, rows)])


if __name__ == "__main__":
    main()
