"""Engines side by side: every measurement on each of them, one after the other, in rounds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dflash.tools.bench.bench_files import write_report
from vllm_dflash.tools.bench.bench_plan import Measurement, Workload, plan_round
from vllm_dflash.tools.bench.bench_record import Record
from vllm_dflash.tools.bench.sides import PLAIN, PLUGIN, Side, side_environment
from vllm_dflash.tools.engine_process import EngineProcess
from vllm_dflash.tools.progress import Progress
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
    progress: Progress

    def run(self) -> list[Table]:
        """Start the engines, measure all rounds, write results after each of them.

        Returns the tables of the last report.
        """
        with ExitStack() as stack:
            children = self._start(stack)
            plain_rates = self._calibrate(children[PLAIN])
            return self._measure(children, plain_rates)

    def _start(self, stack: ExitStack) -> dict[str, EngineProcess]:
        children: dict[str, EngineProcess] = {}
        for number, side in enumerate(self.record.sides, 1):
            of = f"engine {number} of {len(self.record.sides)}"
            with self.progress.stage(f"starting {of}: {side.name}"):
                log = self.out / "logs" / f"{side.name.replace(' ', '-')}.log"
                child = EngineProcess(
                    log,
                    environment=side_environment(side.plugins),
                    speculative_config=side.speculative_config,
                    **self.engine,
                )
                stack.enter_context(child)
                self.record.about["versions"] |= child.answers.facts()["versions"]
                children[side.name] = child
        for child in children.values():
            stack.callback(child.dismiss)  # all of them, before the first is waited for
        return children

    def _calibrate(self, plain: EngineProcess) -> dict[int, float]:
        """Plain decoding's tokens per second where the plan needs them; roughly will do."""
        rates: dict[int, float] = {}
        for concurrency in self.workload.calibrated:
            with self.progress.stage(f"calibrating: plain, concurrency {concurrency}"):
                for _ in range(2):  # the first one prepares kernels
                    answer = plain.answers.closed(
                        prompts=self.prompts,
                        concurrency=concurrency,
                        tokens=self.workload.tokens,
                        seconds=min(CALIBRATION_SECONDS, self.workload.seconds),
                    )
            rates[concurrency] = answer["tokens_per_second"]
        self.record.about["plain_tokens_per_second_at"] = rates
        return rates

    def _measure(
        self, children: Mapping[str, EngineProcess], plain_rates: Mapping[int, float]
    ) -> list[Table]:
        sides = self.record.sides
        rounds = range(-self.warmup_rounds, self.record.rounds)
        plans = {
            number: plan_round(self.workload, self.prompts, number, plain_rates)
            for number in rounds
        }
        expected = sum(one.expected_seconds for plan in plans.values() for one in plan)
        tables: list[Table] = []
        done = 0.0
        with self.progress.stage("measuring", expected * len(sides)) as tell:
            for number, plan in plans.items():
                counts = number >= 0
                name = f"round {number + 1} of {self.record.rounds}" if counts else "warm-up"
                found = []
                for measurement in plan:
                    # Nobody is always first after another's load.
                    first = number % len(sides)
                    for side in [*sides[first:], *sides[:first]]:
                        tell(done, f"{name}: {measurement}: {side.name}")
                        answer = _ask(children[side.name], side, measurement)
                        found.append({"round": number, **answer})
                        done += measurement.expected_seconds
                if counts:
                    self.record.finish_round(found)
                    tables = write_report(self.record, self.out)
                self.progress.say(f"{name} complete")
        return tables


def _ask(child: EngineProcess, side: Side, measurement: Measurement) -> dict[str, Any]:
    result = child.ask(measurement.question, **measurement.arguments)
    return {
        "load": measurement.load,
        "setting": measurement.setting,
        "side": side.name,
        "result": result,
        "stats": child.answers.dflash_stats()[0] if side.plugins == PLUGIN else None,
    }
