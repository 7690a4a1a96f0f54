"""Compares engines: in each round, runs every measurement on each engine in turn."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from vllm_dflash.tools.bench.bench_datasets import Asked, Dataset
from vllm_dflash.tools.bench.bench_plan import (
    CLOSED,
    SHORT,
    Measurement,
    Workload,
    plan_closed,
    plan_contexts,
    plan_requests,
    plan_round,
    plan_short,
)
from vllm_dflash.tools.bench.bench_prompts import long_texts
from vllm_dflash.tools.bench.bench_record import Record
from vllm_dflash.tools.bench.bench_report import comparison_table
from vllm_dflash.tools.bench.sides import (
    PLAIN,
    PLUGIN,
    SCHEDULE,
    Side,
    SideEngines,
    tuned_schedule,
)
from vllm_dflash.tools.engine_answers import Facts
from vllm_dflash.tools.progress import Progress

CALIBRATION_SECONDS = 2.0
CALIBRATION_WINDOWS = 2
"""Only the last window counts; kernels are prepared before it."""
MINUTES_TO_START = 1.0
"""Approximate, for an engine that has two cores for itself."""


@dataclass
class Comparison:
    """Runs a workload on every side of a record, and writes the results to a folder."""

    record: Record
    workload: Workload
    prompts: dict[str, list[str]]
    """Prompts by name of their file."""
    engines: SideEngines
    out: Path
    progress: Progress
    warmup_rounds: int = 1
    tune_schedule: bool = False
    """Whether to add a side with vLLM's own schedule, tuned by measuring its fixed K here."""
    dataset: Dataset | None = None
    """A set of requests to measure, instead of loads."""

    @property
    def all_prompts(self) -> list[str]:
        """Prompts of all files."""
        return [*chain(*self.prompts.values())]

    def run(self) -> None:
        """Start the engines, measure all rounds, and write the results after each."""
        self.progress.say(self.announcement())
        sides, rounds = self.record.sides, self.record.rounds
        with self.engines:
            facts = self.engines.start(sides, self.progress)
            for one in facts:
                self.record.about["versions"] |= one["versions"]
            contexts = self._plan_contexts(min(one["cache_tokens"] for one in facts))
            requests = self._requests(facts)
            plain_rates = self._calibrate()
            served_rates = self._calibrate_served()
            self.record.about["plain_tokens_per_second_at"] = plain_rates
            self.record.about["plain_short_tokens_per_second_at"] = served_rates
            for number in range(-self.warmup_rounds, rounds):
                plan = plan_round(self.workload, self.prompts, number, plain_rates, served_rates)
                plan += contexts
                if self.dataset is not None:  # two per request in flight suffice to warm up
                    most = None if number >= 0 else 2 * max(self.workload.concurrency)
                    plan += plan_requests(self.workload, self.dataset, requests[:most])
                first = number % len(sides)  # so that no side always comes first in a measurement
                in_turns = [*sides[first:], *sides[:first]]
                if number < 0:
                    self._measure("warm-up", plan, in_turns)
                    continue
                found = self._measure(f"round {number + 1} of {rounds}", plan, in_turns)
                self.record.finish_round([{"round": number, **one} for one in found])
                self.record.write(self.out)
                if number + 1 < rounds:  # the report follows the last round
                    results = self.record.results
                    for load in results.loads:
                        self.progress.say(comparison_table(results, load).plain())
            if self.workload.where:  # last, since it leaves timers in the engines
                plan = contexts or plan_closed(self.workload, CLOSED, self.all_prompts)
                if SHORT in self.workload.loads:  # includes prompts, unlike the others
                    plan = plan_short(self.workload, self.all_prompts, "where", served_rates)
                plan = [replace(one, question="where") for one in plan]
                self.record.where += self._measure("where the time goes", plan, sides)
                self.record.write(self.out)

    def announcement(self) -> str:
        """Say what will run, and about how long it takes."""
        names = [side.name for side in self.record.sides] + [SCHEDULE] * self.tune_schedule
        rounds = self.warmup_rounds + self.record.rounds
        minutes = MINUTES_TO_START * (1 + math.ceil((len(names) - 1) / self.engines.at_once))
        minutes += len(names) * rounds * self.workload.seconds_of_round / 60
        reading = ""
        if self.workload.contexts:
            tokens = max(self.workload.contexts) * max(self.workload.concurrency)
            reading = f", plus the time each engine takes to read prompts of {tokens:,} tokens"
        if self.dataset is not None:
            reading = f", plus the time for {len(self.dataset.requests)} requests a round on each"
        return (
            f"starting {len(names)} engines ({', '.join(names)}), then"
            f" {self.warmup_rounds} warm-up and {self.record.rounds} measured rounds: about"
            f" {max(1, round(minutes))} minutes{reading}. Ctrl-C stops; complete rounds are kept."
        )

    def _plan_contexts(self, room: int) -> list[Measurement]:
        """Plan the contexts that fit the caches. Raises ValueError if none of them does."""
        if not self.workload.contexts:
            return []
        texts = long_texts(self.all_prompts, max(self.workload.concurrency))
        tokens = self.engines.ask(PLAIN, "encode", texts=texts)
        plan = plan_contexts(self.workload, tokens, room)
        without = len(self.workload.contexts) * len(self.workload.concurrency) - len(plan)
        words = (
            f"the engines' caches hold {room:,} tokens each; raise VLLM_CPU_KVCACHE_SPACE (GiB) on"
            " a CPU, or --gpu-memory-utilization on a GPU"
        )
        if not plan:
            raise ValueError(f"there is no room for any of the contexts: {words}.")
        if without:
            self.progress.say(f"{without} settings are left out: {words}")
        return plan

    def _requests(self, facts: Sequence[Facts]) -> list[Asked]:
        """Tokenize the set's requests that fit all engines. Raises ValueError if none does."""
        if self.dataset is None:
            return []
        asked, template = self.dataset.requests, self.dataset.template
        texts = [one.prompt for one in asked]
        tokens = self.engines.ask(PLAIN, "encode", texts=texts, template=template)
        room = min(one["max_model_len"] for one in facts)
        requests = [
            one._replace(prompt=prompt)
            for one, prompt in zip(asked, tokens, strict=True)
            if len(prompt) + one.tokens <= room
        ]
        if len(requests) < len(asked):
            left_out = f"{len(asked) - len(requests)} of {len(asked)} prompts"
            words = f"{left_out} are left out: with their answers, they exceed {room:,} tokens"
            if not requests:
                raise ValueError(f"{words}. Raise --max-model-len.")
            self.progress.say(f"{words} (--max-model-len)")
        return requests

    def _calibrate(self) -> dict[int, float]:
        """Estimate plain decoding's tokens per second at each concurrency that the plan needs.

        With `tune_schedule`, the same measurements choose the K of vLLM's schedule.
        """
        sides = self.record.sides
        counts, lengths = {*self.workload.calibrated}, {PLAIN: 0}
        if self.tune_schedule:
            counts |= {*self.workload.concurrency}
            lengths |= {one.name: one.draft_tokens or 0 for one in sides if one.kind == "native"}
        short = replace(
            self.workload,
            concurrency=tuple(sorted(counts)),
            seconds=min(CALIBRATION_SECONDS, self.workload.seconds),
        )
        plan = plan_closed(short, CLOSED, self.all_prompts)
        calibrated = [side for side in sides if side.name in lengths]
        rates: dict[int, dict[int, float]] = defaultdict(dict)
        for _ in range(CALIBRATION_WINDOWS if plan else 0):
            for one in self._measure("calibrating", plan, calibrated):
                rate = one["result"]["tokens_per_second"]
                rates[one["setting"]][lengths[one["side"]]] = rate
        if self.tune_schedule:
            config = calibrated[-1].speculative_config or {}
            schedule = tuned_schedule(config["model"], rates)
            sides.insert(len(calibrated), schedule)
            self.progress.say(f"{SCHEDULE}: {schedule.speculative_config}")
            self.engines.start([schedule], self.progress)
        return {count: rates[count][0] for count in self.workload.calibrated}

    def _calibrate_served(self) -> dict[int, float]:
        """Estimate plain decoding's tokens per second for short answers, including prompts."""
        nothing_yet = dict.fromkeys(self.workload.served, 0.0)
        plan = plan_short(self.workload, self.all_prompts, "calibration", nothing_yet)
        plain = [side for side in self.record.sides if side.name == PLAIN]
        rates: dict[int, float] = {}
        for _ in range(CALIBRATION_WINDOWS if plan else 0):
            for one in self._measure("calibrating", plan, plain):
                rates[one["setting"]] = one["result"]["tokens_per_second"]
        return rates

    def _measure(
        self, name: str, plan: Sequence[Measurement], sides: Sequence[Side]
    ) -> list[dict[str, Any]]:
        """Run every measurement on each side in turn."""
        found: list[dict[str, Any]] = []
        with self.progress.stage(name, len(plan) * len(sides), "measurements") as tell:
            for measurement in plan:
                for side in sides:
                    tell(len(found), f"{measurement}: {side.name}")
                    found.append(self._ask(side, measurement))
            tell(len(found))
        return found

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
