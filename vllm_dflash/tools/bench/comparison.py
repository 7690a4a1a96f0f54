"""Compares engines: in each round, runs every measurement on each engine in turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_dflash.tools.bench.bench_datasets import Asked, Dataset
from vllm_dflash.tools.bench.bench_plan import Measurement, Workload
from vllm_dflash.tools.bench.bench_record import Record
from vllm_dflash.tools.bench.sides import PLAIN, PLUGIN, Side, SideEngines
from vllm_dflash.tools.engine_answers import Facts
from vllm_dflash.tools.progress import Progress

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
    dataset: Dataset | None = None
    """A set of requests to measure, instead of loads."""
    _requests: list[Asked] = field(default_factory=list, init=False)
    """The set's requests that fit all engines; their prompts are token ids."""

    def run(self) -> None:
        """Start the engines, measure all rounds, and write the results after each."""
        self.progress.say(self.announcement())
        sides, rounds = self.record.sides, self.record.rounds
        with self.engines:
            facts = self.engines.start(sides, self.progress)
            for one in facts:
                self.record.about["versions"] |= one["versions"]
            self._requests = self._fitting_requests(facts)
            for number in range(-self.warmup_rounds, rounds):
                plan = self._plan(number)
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
                        self.progress.say(results.interim_table(load).plain())

    def announcement(self) -> str:
        """Say what will run, and about how long it takes."""
        names = [side.name for side in self.record.sides]
        rounds = self.warmup_rounds + self.record.rounds
        minutes = MINUTES_TO_START * (1 + math.ceil((len(names) - 1) / self.engines.at_once))
        minutes += len(names) * rounds * self.workload.seconds_of_round / 60
        more = ""
        if self.dataset is not None:  # cannot be estimated
            more = f", plus the time for {len(self.dataset.requests)} requests a round on each"
        return (
            f"starting {len(names)} engines ({', '.join(names)}), then"
            f" {self.warmup_rounds} warm-up and {self.record.rounds} measured rounds: about"
            f" {max(1, round(minutes))} minutes{more}. Ctrl-C stops; complete rounds are"
            " kept."
        )

    def _plan(self, number: int) -> list[Measurement]:
        """Plan a round; negative numbers are those of warm-up rounds."""
        plan = self.workload.plan_round(self.prompts, number)
        if self.dataset is not None:  # two per request in flight suffice to warm up
            most = None if number >= 0 else 2 * max(self.workload.concurrency)
            plan += self.workload.plan_requests(self.dataset, self._requests[:most])
        return plan

    def _fitting_requests(self, facts: Sequence[Facts]) -> list[Asked]:
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
