"""Engines side by side: every measurement on each of them, one after the other, in rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_dflash.tools.bench.bench_files import standing_of, write_report
from vllm_dflash.tools.bench.bench_plan import (
    THROUGHPUT_LOADS,
    Measurement,
    Workload,
    plan_contexts,
    plan_round,
    plan_where,
)
from vllm_dflash.tools.bench.bench_prompts import long_texts
from vllm_dflash.tools.bench.bench_record import Record
from vllm_dflash.tools.bench.schedule import tuned_ranges
from vllm_dflash.tools.bench.side_engines import SideEngines, seconds_to_start
from vllm_dflash.tools.bench.sides import PLAIN, PLUGIN, SCHEDULE, Side, schedule_side
from vllm_dflash.tools.progress import Progress

CALIBRATION_SECONDS = 2.0
CALIBRATION_WINDOWS = 2
"""The last one tells; before it, kernels are prepared."""


@dataclass
class Comparison:
    """Runs a workload on every side of a record, and keeps what it finds in a folder."""

    record: Record
    workload: Workload
    prompts: list[str]
    engines: SideEngines
    warmup_rounds: int
    out: Path
    progress: Progress
    tune_schedule: bool = False
    """Whether a side with vLLM's own schedule is added, made of what its fixed K reach here."""
    where: bool = False
    """Whether it is also found out where the time goes. The engines' workers are `TimedSteps`."""
    _of_contexts: list[Measurement] = field(default_factory=list)
    """What every round measures of contexts; known when the engines are up."""

    def run(self) -> None:
        """Start the engines, measure all rounds, write results after each of them."""
        self.progress.say(self.announcement())
        with self.engines:
            facts = self.engines.start(self.record.sides)
            for one in facts:
                self.record.about["versions"] |= one["versions"]
            if self.workload.contexts:
                self._of_contexts = self._plan_contexts(min(one["cache_tokens"] for one in facts))
            rates = {one: self._rate(*one) for one in self._calibrations}
            plain_rates = {count: rates[PLAIN, count] for count in self.workload.calibrated}
            self.record.about["plain_tokens_per_second_at"] = plain_rates
            if self.tune_schedule:
                side = self._tuned(rates)
                self.record.sides.insert(1 + len(self._natives), side)
                self.engines.start([side])
            self._measure(plain_rates)
            if self.where:
                self._find_where()

    def announcement(self) -> str:
        """What is going to happen, and about how long it takes."""
        names = self._names
        reading = ""
        if self.workload.contexts:
            tokens = max(self.workload.contexts) * max(self.workload.concurrency)
            reading = f", and what each engine takes to read prompts of {tokens:,} tokens"
        return (
            f"{len(names)} engines ({', '.join(names)}) are started, then follow"
            f" rounds, {self.warmup_rounds} to warm up and {self.record.rounds} that count: about"
            f" {max(1, round(self.seconds / 60))} minutes{reading}. Ctrl-C ends it; complete rounds"
            " are kept."
        )

    @property
    def seconds(self) -> float:
        """About how long all of it takes."""
        seconds = seconds_to_start(len(self.record.sides), self.engines.at_once)
        if self.tune_schedule:
            seconds += seconds_to_start(1, at_once=1)
        calibrations = self._calibrations
        seconds += len(calibrations) * CALIBRATION_WINDOWS * self._calibration_seconds
        rounds = self.warmup_rounds + self.record.rounds
        seconds += len(self._names) * rounds * self.workload.seconds_of_round
        if self.warmup_rounds:
            loads = {*self.workload.loads} & {*THROUGHPUT_LOADS}
            warm = [count for _, count in calibrations if count in self.workload.concurrency]
            seconds -= len(loads) * len(warm) * self.workload.seconds
        if self.where:
            counts = max(1, len(self.workload.contexts)) * len(self.workload.concurrency)
            seconds += len(self._names) * counts * self.workload.seconds
        return seconds

    @property
    def _names(self) -> list[str]:
        """Of all sides there will be."""
        names = [side.name for side in self.record.sides]
        if self.tune_schedule:
            names.insert(1 + len(self._natives), SCHEDULE)
        return names

    @property
    def _natives(self) -> list[Side]:
        return [side for side in self.record.sides if side.kind == "native"]

    @property
    def _calibrations(self) -> list[tuple[str, int]]:
        """Sides and concurrencies whose tokens per second are to be known before the rounds."""
        of_plain = [(PLAIN, count) for count in self.workload.calibrated]
        counts = sorted({*self.workload.concurrency, *self.workload.calibrated})
        names = [PLAIN, *(side.name for side in self._natives)] if self.tune_schedule else []
        return list(dict.fromkeys([*of_plain, *((name, one) for one in counts for name in names)]))

    @property
    def _calibration_seconds(self) -> float:
        return min(CALIBRATION_SECONDS, self.workload.seconds)

    def _rate(self, name: str, concurrency: int) -> float:
        """Tokens per second, roughly."""
        with self.progress.stage(f"calibrating: {name}, concurrency {concurrency}"):
            for _ in range(CALIBRATION_WINDOWS):
                answer = self.engines.ask(
                    name,
                    "closed",
                    prompts=self.prompts,
                    concurrency=concurrency,
                    tokens=self.workload.tokens,
                    seconds=self._calibration_seconds,
                )
        return answer["tokens_per_second"]

    def _tuned(self, rates: Mapping[tuple[str, int], float]) -> Side:
        """vLLM's own DFlash with the K that is fastest at each concurrency."""
        lengths = {PLAIN: 0} | {side.name: side.draft_tokens or 0 for side in self._natives}
        by_count: dict[int, dict[int, float]] = {}
        for (name, count), rate in rates.items():
            by_count.setdefault(count, {})[lengths[name]] = rate
        ranges = tuned_ranges(by_count)
        self.progress.say(f"{SCHEDULE}, as (first, last, K) in numbers of requests: {ranges}")
        drafter = (self._natives[0].speculative_config or {})["model"]
        return schedule_side(drafter, ranges, max(lengths.values()))

    def _measure(self, plain_rates: Mapping[int, float]) -> None:
        sides = self.record.sides
        rounds = range(-self.warmup_rounds, self.record.rounds)
        expected = len(rounds) * self.workload.seconds_of_round * len(sides)
        done = 0.0
        with self.progress.stage("measuring", expected) as tell:
            for number in rounds:
                counts = number >= 0
                name = f"round {number + 1} of {self.record.rounds}" if counts else "warm-up"
                found = []
                plan = plan_round(self.workload, self.prompts, number, plain_rates)
                for measurement in plan + self._of_contexts:
                    # Nobody is always first after another's load.
                    first = number % len(sides)
                    for side in [*sides[first:], *sides[:first]]:
                        if number != -1 or not self._is_warm(side, measurement):
                            tell(done, f"{name}: {measurement}: {side.name}")
                            found.append({"round": number, **self._ask(side, measurement)})
                        done += measurement.expected_seconds
                self.progress.say(f"{name} complete")
                if counts:
                    self.record.finish_round(found)
                    write_report(self.record, self.out)
                if 0 <= number < self.record.rounds - 1:  # after the last one comes the report
                    for table in standing_of(self.record):
                        self.progress.say(table.plain())

    def _find_where(self) -> None:
        """After the rounds: timing costs next to nothing, but they are to be as in use."""
        plan = plan_where(self.workload, self.prompts, self._of_contexts)
        expected = len(self.record.sides) * sum(one.expected_seconds for one in plan)
        done = 0.0
        with self.progress.stage("where the time goes", expected) as tell:
            for measurement in plan:
                for side in self.record.sides:
                    tell(done, f"{measurement}: {side.name}")
                    self.record.where.append(self._ask(side, measurement))
                    done += measurement.expected_seconds
        write_report(self.record, self.out)

    def _plan_contexts(self, room: int) -> list[Measurement]:
        """Raises ValueError where there is room for none of them."""
        texts = long_texts(self.prompts, max(self.workload.concurrency))
        tokens = self.engines.ask(PLAIN, "encode", texts=texts)
        plan = plan_contexts(self.workload, tokens, room)
        without = len(plan_contexts(self.workload, tokens, math.inf)) - len(plan)
        words = (
            f"the engines' caches hold {room:,} tokens each; more do with VLLM_CPU_KVCACHE_SPACE"
            " (GiB) on a CPU, --gpu-memory-utilization on a GPU"
        )
        if not plan:
            raise ValueError(f"there is no room for any of the contexts: {words}.")
        if without:
            self.progress.say(f"{without} settings are left out: {words}")
        return plan

    def _is_warm(self, side: Side, measurement: Measurement) -> bool:
        """Whether calibrating asked this already, for longer than it takes to prepare kernels.

        Never ours, which also learns while it warms up.
        """
        is_closed = measurement.load in THROUGHPUT_LOADS
        return is_closed and (side.name, measurement.setting) in self._calibrations

    def _ask(self, side: Side, measurement: Measurement) -> dict[str, Any]:
        result = self.engines.ask(side.name, measurement.question, **measurement.arguments)
        is_ours = side.plugins == PLUGIN
        return {
            "load": measurement.load,
            "setting": measurement.setting,
            "side": side.name,
            "result": result,
            "stats": self.engines.ask(side.name, "dflash_stats")[0] if is_ours else None,
        }
