"""Plans the measurements of each round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random
from types import MappingProxyType
from typing import Any

from vllm_dflash.tools.bench.bench_datasets import Asked, Dataset
from vllm_dflash.tools.bench.bench_prompts import TEXTS, easy_and_hard, in_order_of_round

CLOSED, MIXED, SWING = "closed", "mixed", "swing"
SHORT, ARRIVALS = "short", "arrivals"
LOADS = {
    CLOSED: "a fixed number of requests in flight",
    MIXED: "like closed; every other prompt has shuffled words, which are hard to draft for",
    "edit": "like closed, with its own prompts: source code to repeat with a change",
    "quote": "like closed, with its own prompts: passages to quote from",
    "prose": "like closed, with its own prompts: passages to continue, with little repetition",
    SWING: "a number of requests in flight that changes from phase to phase",
    SHORT: "a list of requests with answers of 16 to 96 tokens, a fixed number in flight",
    ARRIVALS: "like short, arriving at random (Poisson) at --shares of what plain decoding serves",
}
CLOSED_LOADS = (CLOSED, MIXED, *TEXTS)
"""Loads with a fixed number of requests in flight."""
SERVED = (SHORT, ARRIVALS)
"""Loads that are lists of short requests, whose waiting times are reported."""
SHORTEST, LONGEST = 16, 96
"""Tokens of their answers."""
MEAN_ANSWER = (SHORTEST + LONGEST) / 2
CONTEXT = "context"
"""Prefix of the names of loads whose settings are tokens of context."""
SHORTER_BY = 32
"""Step, in tokens, by which a long prompt is shortened to get different texts."""
FROM_THE_END = 64
"""Tokens to keep free before the context limit, near which some drafters stop drafting."""


def setting_name(load: str) -> str:
    """Return what the settings of a load are, for heads of tables."""
    if load.startswith(CONTEXT):
        return CONTEXT
    return {SWING: "phase: requests", ARRIVALS: "% of plain's maximum"}.get(load, "concurrency")


@dataclass(frozen=True)
class Workload:
    """What to measure in every round."""

    loads: tuple[str, ...]
    concurrency: tuple[int, ...]
    phases: tuple[int, ...]
    """Concurrencies of the swing's phases, in order."""
    tokens: int
    """New tokens per request."""
    seconds: float
    """Length of a window, and approximately of a phase."""
    contexts: tuple[int, ...] = ()
    """Prompt lengths at which decoding is measured, instead of loads."""
    shares: tuple[int, ...] = ()
    """Rates of arrivals, in percent of the most requests per second that plain decoding serves."""
    where: bool = False
    """Whether to measure where the time goes; needs `TimedSteps` as worker extension."""
    temperatures: tuple[float, ...] = (0.0,)
    """Temperatures at which each closed load is measured."""
    ignore_eos: bool = False
    """Whether answers of closed loads continue to their maximum length."""
    files: tuple[str, ...] = ("",)
    """Names of the prompt files; the loads closed and mixed are measured with each."""

    @property
    def calibrated(self) -> list[int]:
        """Concurrencies at which the plan needs plain decoding's tokens per second."""
        return sorted({*self.phases}) if SWING in self.loads else []

    @property
    def served(self) -> list[int]:
        """Concurrencies at which the plan needs plain decoding's tokens per second in `short`."""
        if SHORT in self.loads:
            return sorted({*self.concurrency})
        return [max(self.concurrency)] if ARRIVALS in self.loads else []

    @property
    def highest_concurrency(self) -> int:
        """Most requests in flight."""
        only_swings = {*self.loads} == {SWING} and not self.where
        return max([*self.calibrated, *(() if only_swings else self.concurrency)])

    @property
    def seconds_of_round(self) -> float:
        """Approximate seconds per round on one engine: the sum of windows and phases."""
        windows = len(self.contexts) * len(self.concurrency)
        settings = {SWING: self.phases, ARRIVALS: self.shares}
        for load in self.loads:
            times = len(self.temperatures) if load in CLOSED_LOADS else 1
            times *= len(self.files) if load in (CLOSED, MIXED) else 1
            windows += times * len(settings.get(load, self.concurrency))
        return windows * self.seconds

    def room_for(self, context: int) -> int:
        """Return the tokens that a request with this much context may need in an engine."""
        return context + 2 * self.tokens + FROM_THE_END


@dataclass(frozen=True)
class Measurement:
    """One question for every engine."""

    load: str
    setting: int | None
    """Concurrency, share of arrivals, or tokens of context; None for the swing as a whole."""
    question: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        of = "" if self.setting is None else f", {setting_name(self.load)} {self.setting}"
        return self.load + of


def plan_closed(
    workload: Workload, load: str, prompts: Sequence[str], temperature: float = 0.0
) -> list[Measurement]:
    """Plan one window per concurrency."""
    asked: dict[str, Any] = {"prompts": prompts, "tokens": workload.tokens}
    asked["seconds"] = workload.seconds
    asked["sampling"] = {"temperature": temperature, "ignore_eos": workload.ignore_eos}
    return [
        Measurement(load, count, "closed", asked | {"concurrency": count})
        for count in workload.concurrency
    ]


def plan_short(
    workload: Workload, prompts: Sequence[str], seed: str, rates: Mapping[int, float]
) -> list[Measurement]:
    """Plan a list of short answers per concurrency.

    `rates`: expected tokens per second by concurrency. A list has as many answers as that rate
    serves in a window, and at least two per request in flight.
    """
    plan = []
    for count, rate in rates.items():
        answers = short_answers(seed, max(round(rate * workload.seconds / MEAN_ANSWER), 2 * count))
        asked = {"prompts": prompts, "answers": answers, "concurrency": count}
        plan.append(Measurement(SHORT, count, "answers", asked))
    return plan


def plan_arrivals(
    workload: Workload, prompts: Sequence[str], seed: str, served: float
) -> list[Measurement]:
    """Plan short answers that arrive at random, at each share of `served` tokens per second."""
    plan = []
    for share in workload.shares:
        rate = served / MEAN_ANSWER * share / 100  # requests per second
        gaps = Random(f"arrivals {seed}")
        arrivals = [gaps.expovariate(rate)]
        while arrivals[-1] < workload.seconds:
            arrivals.append(arrivals[-1] + gaps.expovariate(rate))
        answers = short_answers(seed, len(arrivals))
        asked = {"prompts": prompts, "answers": answers, "arrivals": arrivals}
        plan.append(Measurement(ARRIVALS, share, "answers", asked))
    return plan


def short_answers(seed: str, count: int) -> list[int]:
    """Draw the lengths of `count` answers, in tokens."""
    lengths = Random(f"answers {seed}")
    return [lengths.randint(SHORTEST, LONGEST) for _ in range(count)]


def plan_round(
    workload: Workload,
    prompts: Mapping[str, Sequence[str]],
    round_number: int,
    plain_rates: Mapping[int, float],
    served_rates: Mapping[int, float] = MappingProxyType({}),
) -> list[Measurement]:
    """Plan all measurements of a round.

    `prompts`: prompts by name of their file. `plain_rates`: plain decoding's tokens per second by
    concurrency. `served_rates`: the same for short answers, including the time for their prompts.
    """
    plan: list[Measurement] = []
    texts = in_order_of_round([*chain(*prompts.values())], round_number)
    for load in workload.loads:
        if load == SWING:
            tokens = [round(plain_rates[count] * workload.seconds) for count in workload.phases]
            phases = list(zip(workload.phases, tokens, strict=True))
            asked = {"prompts": texts, "tokens": workload.tokens, "phases": phases}
            plan.append(Measurement(load, None, "swing", asked))
        elif load == SHORT:
            rates = {count: served_rates[count] for count in workload.concurrency}
            plan += plan_short(workload, texts, str(round_number), rates)
        elif load == ARRIVALS:
            most = served_rates[max(workload.concurrency)]
            plan += plan_arrivals(workload, texts, str(round_number), most)
        else:
            plan += _plan_closed_loads(workload, load, prompts, round_number)
    return plan


def _plan_closed_loads(
    workload: Workload, load: str, prompts: Mapping[str, Sequence[str]], round_number: int
) -> list[Measurement]:
    """Plan a closed load at each temperature, with each prompt file or with its own prompts."""
    plan: list[Measurement] = []
    files = {"": TEXTS[load]()} if load in TEXTS else prompts
    for file, of_file in files.items():
        texts = in_order_of_round(of_file, round_number)
        texts = easy_and_hard(texts) if load == MIXED else texts
        for temperature in workload.temperatures:
            at = f"temperature {temperature:g}" * bool(temperature)
            name = ", ".join(filter(None, [load, file, at]))
            plan += plan_closed(workload, name, texts, temperature)
    return plan


def plan_requests(
    workload: Workload, dataset: Dataset, requests: Sequence[Asked]
) -> list[Measurement]:
    """Plan a set's requests, whose prompts are token ids, at each concurrency."""
    categories, prompts, answers = zip(*requests, strict=True)
    asked: dict[str, Any] = {"prompts": prompts, "answers": answers, "categories": categories}
    asked["sampling"] = dataset.sampling
    return [
        Measurement(dataset.name, count, "answers", asked | {"concurrency": count})
        for count in workload.concurrency
    ]


def plan_contexts(
    workload: Workload, texts: Sequence[Sequence[int]], room: float
) -> list[Measurement]:
    """Plan decoding alone, at each context length and concurrency that fits the cache.

    `texts`: token ids of one text per request of the highest concurrency; they are cut or repeated
    to the context length. `room`: tokens that the engines' caches hold.
    """
    plan = []
    for count in workload.concurrency:
        for length in workload.contexts:
            if count * workload.room_for(length) > room:
                continue
            prompts = [(list(text) * -(-length // len(text)))[:length] for text in texts[:count]]
            asked = {
                "prompts": prompts,
                "concurrency": count,
                "tokens": workload.tokens,
                "seconds": workload.seconds,
                "shorter": list(range(0, length // 8, SHORTER_BY)) or [0],
            }
            plan.append(Measurement(f"{CONTEXT}, {count} at a time", length, "decoding", asked))
    return plan
