"""What deciding on V2 takes of the host: microseconds a step to plan, to learn, to choose a budget.

    scripts/run.sh python benchmarks/host_microseconds.py

Blocks of all requests, K = 15; lower deciles, for others use the machine as well. No engine runs:
this is what the scheduler and the worker do beside vLLM's own on a GPU. 20 seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from vllm_dflash.planning.ahead import AheadPlanner
from vllm_dflash.planning.budget import Load, RecentChances, best_budget
from vllm_dflash.planning.step import BLOCK, Outcomes, Step
from vllm_dflash.tools.console import print_report
from vllm_dflash.tools.tables import Table

K, STEPS = 15, 300


def microseconds(count: int) -> list[float]:
    """Times of planning, of learning and of a budget, in steps of so many requests."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from support.judge import table_of

    rng, costs = np.random.default_rng(count), table_of("assumed_gpu").costs(count)
    planner, recent = AheadPlanner(K, count, looks_up=True), RecentChances(count, K)
    planner.start(costs, [0, K], trims=True)
    slots, names = np.arange(count), [str(number) for number in range(count)]
    context, drafts = rng.integers(100, 2000, count), np.full(count, K)
    load = Load(count, count, float(context.sum()), float(context.mean()), count * (1 + K))
    times: dict[str, list[float]] = {"plan": [], "observe": [], "budget": []}

    def timed(name: str, work: Callable[[], object]) -> None:
        started = time.perf_counter()
        work()
        times[name].append(1e6 * (time.perf_counter() - started))

    def budget(confidence: np.ndarray) -> int:
        recent.add(slots, confidence)
        scores, steps = recent.sample(slots, drafts)
        return best_budget(costs, load, scores, steps, int(drafts.sum()))

    for _ in range(STEPS):
        confidence = rng.uniform(0.6, 1.0, (count, K))
        lucky = (rng.uniform(size=(count, K)) < confidence).cumprod(axis=1).sum(axis=1)
        matches = rng.integers(1, 9, count) * (rng.uniform(size=count) < 0.2)
        known = np.minimum(lucky + 1, K) * (matches > 0)
        none = np.zeros((count, 0), np.int64)
        texts = matches, K * (matches > 0), known, np.minimum(lucky, known)
        told = Outcomes(np.full(count, BLOCK), drafts, *texts, drafts, lucky, confidence, none)
        step = Step(names, 1 + lucky, count * (1 + K), drafts, context_lens=context)
        step.draft_rows = step.rows
        step.target_seconds = float(costs.verify.at(step.rows))
        timed("plan", partial(planner.plan, names, context))
        timed("observe", partial(planner.observe, step, told))
        timed("budget", partial(budget, confidence))
    return [float(np.quantile(one, 0.1)) for one in times.values()]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256])
    rows = [
        [str(count), *(f"{one:.0f}" for one in microseconds(count))]
        for count in parser.parse_args().requests
    ]
    print_report([Table("Microseconds a step", ["requests", "plan", "observe", "budget"], rows)])


if __name__ == "__main__":
    main()
