"""Engines side by side: every measurement on each of them, one after the other, in rounds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vllm_dflash.tools.bench.bench_engine import BenchChild
from vllm_dflash.tools.bench.bench_plan import Measurement, Workload, plan_round
from vllm_dflash.tools.bench.output import write_report
from vllm_dflash.tools.bench.record import Record
from vllm_dflash.tools.bench.sides import PLAIN, PLUGIN, Side
from vllm_dflash.tools.tables import Table

CALIBRATION_SECONDS = 2.0


@dataclass
class Comparison:
    """Runs a workload on every side of a record, and keeps what it finds in a folder."""

    record: Record
    workload: Workload
    prompts: list[str]
    engine: dict[str, Any]
    """Arguments of every engine."""
    warmup_rounds: int
    out: Path
    console: Console

    def run(self) -> list[Table]:
        """Start the engines, measure all rounds, write results after each of them.

        Returns the tables of the last report.
        """
        with ExitStack() as stack:
            children = self._start(stack)
            plain_rates = self._calibrate(children[PLAIN])
            with Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("left:"),
                TimeRemainingColumn(),
                console=self.console,
                refresh_per_second=1,  # the engines need the processor
            ) as progress:
                return self._measure(children, plain_rates, progress)

    def _start(self, stack: ExitStack) -> dict[str, BenchChild]:
        children: dict[str, BenchChild] = {}
        for number, side in enumerate(self.record.sides, 1):
            of = f"engine {number} of {len(self.record.sides)}"
            with self.console.status(f"Starting {of}: {side.name}"):
                log = self.out / "logs" / f"{side.name.replace(' ', '-')}.log"
                arguments = dict(self.engine)
                if side.speculative_config:
                    arguments["speculative_config"] = side.speculative_config
                child = stack.enter_context(BenchChild(log, plugins=side.plugins, **arguments))
                self.record.about["versions"] |= child.ask("versions")
                children[side.name] = child
        for child in children.values():
            stack.callback(child.dismiss)  # all of them, before the first is waited for
        return children

    def _calibrate(self, plain: BenchChild) -> dict[int, float]:
        """Plain decoding's tokens per second where the plan needs them; roughly will do."""
        rates: dict[int, float] = {}
        for concurrency in self.workload.calibrated:
            with self.console.status(f"Calibrating: plain, concurrency {concurrency}"):
                for _ in range(2):  # the first one prepares kernels
                    answer = plain.ask(
                        "closed",
                        prompts=self.prompts,
                        concurrency=concurrency,
                        tokens=self.workload.tokens,
                        seconds=min(CALIBRATION_SECONDS, self.workload.seconds),
                    )
            rates[concurrency] = answer["tokens_per_second"]
        self.record.about["plain_tokens_per_second_at"] = rates
        return rates

    def _measure(
        self,
        children: Mapping[str, BenchChild],
        plain_rates: Mapping[int, float],
        progress: Progress,
    ) -> list[Table]:
        sides = self.record.sides
        rounds = range(-self.warmup_rounds, self.record.rounds)
        plans = {
            number: plan_round(self.workload, self.prompts, number, plain_rates)
            for number in rounds
        }
        expected = sum(one.expected_seconds for plan in plans.values() for one in plan)
        tables: list[Table] = []
        task = progress.add_task("", total=expected * len(sides))
        for number, plan in plans.items():
            counts = number >= 0
            name = f"round {number + 1} of {self.record.rounds}" if counts else "warm-up"
            found = []
            for measurement in plan:
                # Nobody is always first after another's load.
                first = number % len(sides)
                for side in [*sides[first:], *sides[:first]]:
                    progress.update(task, description=f"{name}: {measurement}: {side.name}")
                    answer = _ask(children[side.name], side, measurement)
                    found.append({"round": number, **answer})
                    progress.advance(task, measurement.expected_seconds)
            if counts:
                self.record.finish_round(found)
                tables = write_report(self.record, self.out)
            self.console.print(f"{name} complete")
        return tables


def _ask(child: BenchChild, side: Side, measurement: Measurement) -> dict[str, Any]:
    result = child.ask(measurement.question, **measurement.arguments)
    return {
        "load": measurement.load,
        "setting": measurement.setting,
        "side": side.name,
        "result": result,
        "stats": child.ask("dflash_stats") if side.plugins == PLUGIN else None,
    }
