"""What is asked of every engine, round by round."""

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
    MIXED: "the same, every other prompt with shuffled words, which is hard to draft for",
    "edit": "the same with prompts of its own: source code to write out again",
    "quote": "the same: passages to quote from",
    "prose": "the same: passages to continue, which repeat little",
    SWING: "a number of requests in flight that changes from phase to phase",
    SHORT: "a list of requests with answers of 16 to 96 tokens, a fixed number in flight",
    ARRIVALS: "the same, coming at random (Poisson), at shares of what plain decoding serves",
}
CLOSED_LOADS = (CLOSED, MIXED, *TEXTS)
"""Loads with a fixed number of requests in flight."""
SERVED = (SHORT, ARRIVALS)
"""Loads that are lists of requests, each of which waits for its tokens."""
SHORTEST, LONGEST = 16, 96
"""Tokens of their answers."""
MEAN_ANSWER = (SHORTEST + LONGEST) / 2
CONTEXT = "context"
"""How names of loads begin whose settings are tokens of context."""
SHORTER_BY = 32
"""Tokens between two ends of a long prompt, from which different texts follow."""
FROM_THE_END = 64
"""Tokens that are kept between requests and the context limit: near it, some drafters give up."""


def setting_name(load: str) -> str:
    """What the settings of a load are."""
    if load.startswith(CONTEXT):
        return CONTEXT
    return {SWING: "phase: requests", ARRIVALS: "% of plain's most"}.get(load, "concurrency")


@dataclass(frozen=True)
class Workload:
    """What is measured in every round."""

    loads: tuple[str, ...]
    concurrency: tuple[int, ...]
    phases: tuple[int, ...]
    """Concurrencies of the swing, one after the other."""
    tokens: int
    """New tokens of a request."""
    seconds: float
    """Length of a window, and about that of a phase."""
    contexts: tuple[int, ...] = ()
    """Tokens of prompts whose continuation is measured, instead of loads."""
    shares: tuple[int, ...] = ()
    """Arrivals, in percent of the requests a second that plain decoding serves at its most."""
    where: bool = False
    """Whether it is also measured where the time goes. The engines' workers are `TimedSteps`."""
    temperatures: tuple[float, ...] = (0.0,)
    """Each closed load is measured at each of these."""
    ignore_eos: bool = False
    """Whether answers of closed loads go on to their last token."""
    files: tuple[str, ...] = ("",)
    """Names of the files of prompts; closed loads without prompts of their own are measured with
    each."""

    @property
    def calibrated(self) -> list[int]:
        """Concurrencies at which the plan needs to know plain decoding's tokens per second."""
        return sorted({*self.phases}) if SWING in self.loads else []

    @property
    def served(self) -> list[int]:
        """Concurrencies at which it needs to know how fast plain decoding serves short answers."""
        if SHORT in self.loads:
            return sorted({*self.concurrency})
        return [max(self.concurrency)] if ARRIVALS in self.loads else []

    @property
    def highest_concurrency(self) -> int:
        """Requests in flight at most."""
        only_swings = {*self.loads} == {SWING} and not self.where
        return max([*self.calibrated, *(() if only_swings else self.concurrency)])

    @property
    def seconds_of_round(self) -> float:
        """Seconds for one engine, about: what windows and phases take."""
        windows = len(self.contexts) * len(self.concurrency)
        settings = {SWING: self.phases, ARRIVALS: self.shares}
        for load in self.loads:
            times = len(self.temperatures) if load in CLOSED_LOADS else 1
            times *= len(self.files) if load in (CLOSED, MIXED) else 1
            windows += times * len(settings.get(load, self.concurrency))
        return windows * self.seconds

    def room_for(self, context: int) -> int:
        """Tokens that an engine must be able to take for a request of such a context."""
        return context + 2 * self.tokens + FROM_THE_END


@dataclass(frozen=True)
class Measurement:
    """One question to every engine."""

    load: str
    setting: int | None
    """A concurrency, or tokens of context; the swing is asked for as a whole."""
    question: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        of = "" if self.setting is None else f", {setting_name(self.load)} {self.setting}"
        return self.load + of


def plan_closed(
    workload: Workload, load: str, prompts: Sequence[str], temperature: float = 0.0
) -> list[Measurement]:
    """A window at each number of requests."""
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
    """At each number of requests in flight, as many short answers as so many tokens a second make
    in a window, but at least two for each of them."""
    plan = []
    for count, rate in rates.items():
        answers = short_answers(seed, max(round(rate * workload.seconds / MEAN_ANSWER), 2 * count))
        asked = {"prompts": prompts, "answers": answers, "concurrency": count}
        plan.append(Measurement(SHORT, count, "answers", asked))
    return plan


def plan_arrivals(
    workload: Workload, prompts: Sequence[str], seed: str, served: float
) -> list[Measurement]:
    """Short answers that come at random, at each share of `served` tokens a second."""
    plan = []
    for share in workload.shares:
        rate = served / MEAN_ANSWER * share / 100  # requests a second
        gaps = Random(f"arrivals {seed}")
        arrivals = [gaps.expovariate(rate)]
        while arrivals[-1] < workload.seconds:
            arrivals.append(arrivals[-1] + gaps.expovariate(rate))
        answers = short_answers(seed, len(arrivals))
        asked = {"prompts": prompts, "answers": answers, "arrivals": arrivals}
        plan.append(Measurement(ARRIVALS, share, "answers", asked))
    return plan


def short_answers(seed: str, count: int) -> list[int]:
    """Tokens of so many answers."""
    lengths = Random(f"answers {seed}")
    return [lengths.randint(SHORTEST, LONGEST) for _ in range(count)]


def plan_round(
    workload: Workload,
    prompts: Mapping[str, Sequence[str]],
    round_number: int,
    plain_rates: Mapping[int, float],
    served_rates: Mapping[int, float] = MappingProxyType({}),
) -> list[Measurement]:
    """Everything one round measures.

    `prompts` are those of each file, by its name. `plain_rates` are plain decoding's tokens per
    second by concurrency, `served_rates` the same of short answers, their prompts included.
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
    """One load at each temperature, with each file of prompts or with its own."""
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
    """These requests of a set, in tokens, at each number in flight."""
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
    """Decoding alone, at each length of context and concurrency for which there is room.

    `texts` are tokens, as many as the highest concurrency has requests; they are cut to length, or
    repeated. `room` is how many tokens the engines' caches hold.
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
