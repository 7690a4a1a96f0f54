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
from vllm_dflash.tools.bench.schedule import tuned_ranges
from vllm_dflash.tools.bench.sides import PLUGIN, SCHEDULE, Side, schedule_side, side_environment
from vllm_dflash.tools.engine_process import EngineProcess
from vllm_dflash.tools.progress import Progress

CALIBRATION_SECONDS = 2.0
SECONDS_TO_START = 40.0
"""About; of an engine on a CPU. For the first of its kind there is, vLLM compiles as long again."""


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
    tune_schedule: bool = False
    """Whether a side with vLLM's own schedule is added, made of what its fixed K reach here."""

    def run(self) -> None:
        """Start the engines, measure all rounds, write results after each of them."""
        self.progress.say(self.announcement())
        with ExitStack() as stack:
            children: dict[str, EngineProcess] = {}
            try:
                for side in self.record.sides:
                    children[side.name] = self._start(side, stack)
                plain_rates = {
                    count: self._rate(children, self._plain, count)
                    for count in self.workload.calibrated
                }
                self.record.about["plain_tokens_per_second_at"] = plain_rates
                if self.tune_schedule:
                    side = self._tuned(children)
                    self.record.sides.insert(1 + len(self._natives), side)
                    children[side.name] = self._start(side, stack)
                self._measure(children, plain_rates)
            finally:
                for child in children.values():
                    child.dismiss()  # all of them, before the first is waited for

    def announcement(self) -> str:
        """What is going to happen, and about how long it takes."""
        names = [side.name for side in self.record.sides]
        seconds = 0.0
        if self.tune_schedule:
            names.insert(1 + len(self._natives), SCHEDULE)
            windows = len(self._tuned_counts) * (1 + len(self._natives))
            seconds += 2 * windows * self._calibration_seconds
        rounds = self.warmup_rounds + self.record.rounds
        seconds += len(names) * (SECONDS_TO_START + rounds * self.workload.seconds_of_round)
        return (
            f"{len(names)} engines ({', '.join(names)}) are started, then follow"
            f" rounds, {self.warmup_rounds} to warm up and {self.record.rounds} that count: about"
            f" {max(1, round(seconds / 60))} minutes. Ctrl-C ends it; complete rounds are kept."
        )

    @property
    def _plain(self) -> Side:
        return next(side for side in self.record.sides if side.kind == "plain")

    @property
    def _natives(self) -> list[Side]:
        return [side for side in self.record.sides if side.kind == "native"]

    @property
    def _tuned_counts(self) -> list[int]:
        return sorted({*self.workload.concurrency, *self.workload.calibrated})

    @property
    def _calibration_seconds(self) -> float:
        return min(CALIBRATION_SECONDS, self.workload.seconds)

    def _start(self, side: Side, stack: ExitStack) -> EngineProcess:
        with self.progress.stage(f"starting the engine of {side.name}"):
            child = EngineProcess(
                self.out / "logs" / f"{side.name.replace(' ', '-')}.log",
                environment=side_environment(side.plugins),
                speculative_config=side.speculative_config,
                **self.engine,
            )
            stack.enter_context(child)
            self.record.about["versions"] |= child.answers.facts()["versions"]
        return child

    def _rate(self, children: Mapping[str, EngineProcess], side: Side, concurrency: int) -> float:
        """Tokens per second, roughly."""
        with self.progress.stage(f"calibrating: {side.name}, concurrency {concurrency}"):
            for _ in range(2):  # the first one prepares kernels
                answer = children[side.name].answers.closed(
                    prompts=self.prompts,
                    concurrency=concurrency,
                    tokens=self.workload.tokens,
                    seconds=self._calibration_seconds,
                )
        return answer["tokens_per_second"]

    def _tuned(self, children: Mapping[str, EngineProcess]) -> Side:
        """vLLM's own DFlash with the K that is fastest at each concurrency."""
        sides = {0: self._plain} | {side.draft_tokens or 0: side for side in self._natives}
        rates = {
            count: {k: self._rate(children, side, count) for k, side in sides.items()}
            for count in self._tuned_counts
        }
        ranges = tuned_ranges(rates)
        self.progress.say(f"{SCHEDULE}, as (first, last, K) in numbers of requests: {ranges}")
        drafter = (self._natives[0].speculative_config or {})["model"]
        return schedule_side(drafter, ranges, max(sides))

    def _measure(
        self, children: Mapping[str, EngineProcess], plain_rates: Mapping[int, float]
    ) -> None:
        sides = self.record.sides
        rounds = range(-self.warmup_rounds, self.record.rounds)
        expected = len(rounds) * self.workload.seconds_of_round * len(sides)
        done = 0.0
        with self.progress.stage("measuring", expected) as tell:
            for number in rounds:
                counts = number >= 0
                name = f"round {number + 1} of {self.record.rounds}" if counts else "warm-up"
                found = []
                for measurement in plan_round(self.workload, self.prompts, number, plain_rates):
                    # Nobody is always first after another's load.
                    first = number % len(sides)
                    for side in [*sides[first:], *sides[:first]]:
                        tell(done, f"{name}: {measurement}: {side.name}")
                        answer = _ask(children[side.name], side, measurement)
                        found.append({"round": number, **answer})
                        done += measurement.expected_seconds
                if counts:
                    self.record.finish_round(found)
                    write_report(self.record, self.out)
                self.progress.say(f"{name} complete")


def _ask(child: EngineProcess, side: Side, measurement: Measurement) -> dict[str, Any]:
    result = child.ask(measurement.question, **measurement.arguments)
    return {
        "load": measurement.load,
        "setting": measurement.setting,
        "side": side.name,
        "result": result,
        "stats": child.answers.dflash_stats()[0] if side.plugins == PLUGIN else None,
    }
