"""Plans the measurements of each round."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_dflash.tools.bench.bench_datasets import Asked, Dataset

CLOSED = "closed"
"""The load with a fixed number of requests in flight."""
CONCURRENCY = "concurrency"


@dataclass(frozen=True)
class Measurement:
    """One question for every engine."""

    load: str
    setting: int | None
    """Concurrency; None if the load is measured as a whole."""
    question: str
    """A method of the object that answers in the engine's process, such as `EngineAnswers`."""
    arguments: dict[str, Any]

    def __str__(self) -> str:
        of = "" if self.setting is None else f", {CONCURRENCY} {self.setting}"
        return self.load + of


@dataclass(frozen=True)
class Workload:
    """What to measure in every round. A subclass times steps (`break_even.py`)."""

    loads: tuple[str, ...]
    """Names of loads; none if a set of prompts or steps are measured instead."""
    concurrency: tuple[int, ...]
    tokens: int
    """New tokens per request."""
    seconds: float
    """Length of a window."""
    temperatures: tuple[float, ...] = (0.0,)
    """Temperatures at which each closed load is measured."""
    ignore_eos: bool = False
    """Whether answers of closed loads continue to their maximum length."""
    files: tuple[str, ...] = ("",)
    """Names of the prompt files; the closed load is measured with each."""

    @property
    def highest_concurrency(self) -> int:
        """Most requests in flight."""
        return max(self.concurrency)

    @property
    def seconds_of_round(self) -> float:
        """Approximate seconds per round on one engine: the sum of windows."""
        windows = len(self.files) * len(self.temperatures) * len(self.concurrency)
        return len(self.loads) * windows * self.seconds

    def plan_round(
        self, prompts: Mapping[str, Sequence[str]], round_number: int
    ) -> list[Measurement]:
        """Plan the loads of a round. `prompts`: prompts by name of their file."""
        texts = {file: in_order_of_round(one, round_number) for file, one in prompts.items()}
        return [one for load in self.loads for one in self.plan_with_each(load, texts)]

    def plan_with_each(self, load: str, texts: Mapping[str, Sequence[str]]) -> list[Measurement]:
        """Plan a closed load with each file's prompts, at each temperature."""
        plan: list[Measurement] = []
        for file, of_file in texts.items():
            for temperature in self.temperatures:
                at = f"temperature {temperature:g}" * bool(temperature)
                name = ", ".join(filter(None, [load, file, at]))
                plan += self.plan_closed(name, of_file, temperature)
        return plan

    def plan_closed(
        self, load: str, prompts: Sequence[str], temperature: float = 0.0
    ) -> list[Measurement]:
        """Plan one window per concurrency."""
        asked: dict[str, Any] = {"prompts": prompts, "tokens": self.tokens}
        asked["seconds"] = self.seconds
        asked["sampling"] = {"temperature": temperature, "ignore_eos": self.ignore_eos}
        return [
            Measurement(load, count, "closed", asked | {"concurrency": count})
            for count in self.concurrency
        ]

    def plan_requests(self, dataset: Dataset, requests: Sequence[Asked]) -> list[Measurement]:
        """Plan a set's requests, whose prompts are token ids, at each concurrency."""
        categories, prompts, answers = zip(*requests, strict=True)
        asked: dict[str, Any] = {"prompts": prompts, "answers": answers, "categories": categories}
        asked["sampling"] = dataset.sampling
        return [
            Measurement(dataset.name, count, "answers", asked | {"concurrency": count})
            for count in self.concurrency
        ]


def in_order_of_round(prompts: Sequence[str], round_number: int) -> list[str]:
    """Shuffle the prompts, always the same way for the same round."""
    order = list(prompts)
    random.Random(f"order {round_number}").shuffle(order)
    return order
