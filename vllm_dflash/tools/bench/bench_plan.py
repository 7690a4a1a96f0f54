"""What is asked of every engine, round by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_dflash.tools.bench.bench_prompts import TEXTS, easy_and_hard, in_order_of_round
from vllm_dflash.tools.loads import poisson_arrivals

CLOSED, MIXED, SWING, POISSON = "closed", "mixed", "swing", "poisson"
LOADS = {
    CLOSED: "a fixed number of requests in flight",
    MIXED: "the same, every other prompt with its words shuffled, so hard to draft for",
    "edit": "the same with prompts of its own: source code to write out again",
    "quote": "the same: passages to quote from",
    "prose": "the same: passages to go on from, which repeat little",
    SWING: "a number of requests in flight that changes from phase to phase",
    POISSON: "requests that arrive at random moments, half of them hard to draft for",
}
CONTEXT = "context"
"""How names of loads begin whose settings are tokens of context."""
SATURATION = 16
"""Concurrency at which plain decoding's throughput is what rates are fractions of."""
POISSON_WINDOWS = 3
"""Length of a trace of arrivals, in windows: a few requests say little about a 95th percentile."""
SHORTER_BY = 32
"""Tokens between two ends of a long prompt, from which different texts follow."""
FROM_THE_END = 64
"""Tokens that are kept between requests and the context limit: near it, some drafters give up."""


def setting_name(load: str) -> str:
    """What the settings of a load are."""
    if load.startswith(CONTEXT):
        return CONTEXT
    return {POISSON: "rate", SWING: "phase: requests"}.get(load, "concurrency")


@dataclass(frozen=True)
class Workload:
    """What is measured in every round."""

    loads: tuple[str, ...]
    concurrency: tuple[int, ...]
    phases: tuple[int, ...]
    """Concurrencies of the swing, one after the other."""
    rates: tuple[float, ...]
    """Fractions of plain decoding's throughput at `SATURATION`."""
    tokens: int
    """New tokens of a request."""
    seconds: float
    """Length of a window, and about that of a phase."""
    contexts: tuple[int, ...] = ()
    """Tokens of prompts whose continuation is measured, instead of loads."""

    @property
    def calibrated(self) -> list[int]:
        """Concurrencies at which the plan needs to know plain decoding's tokens per second."""
        phases = self.phases if SWING in self.loads else ()
        return sorted({*phases, *[SATURATION] * (POISSON in self.loads)})

    @property
    def highest_concurrency(self) -> int:
        """Requests in flight at most, as far as that is ours to say."""
        is_closed = self.contexts or {*self.loads} - {SWING, POISSON}
        return max([*self.concurrency * bool(is_closed), *self.calibrated, 1])

    @property
    def seconds_of_round(self) -> float:
        """Of one engine, about: what windows, phases and traces of arrivals take."""
        windows = len(self.contexts) * len(self.concurrency)
        for load in self.loads:
            settings = {SWING: self.phases, POISSON: self.rates}.get(load, self.concurrency)
            windows += len(settings) * (POISSON_WINDOWS if load == POISSON else 1)
        return windows * self.seconds

    def room_for(self, context: int) -> int:
        """Tokens that an engine must be able to take for a request of such a context."""
        return context + 2 * self.tokens + FROM_THE_END


@dataclass(frozen=True)
class Measurement:
    """One question to every engine."""

    load: str
    setting: float | None
    """A concurrency, a rate, or tokens of context; the swing is asked for as a whole."""
    question: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        of = "" if self.setting is None else f", {setting_name(self.load)} {self.setting}"
        return self.load + of


def plan_closed(
    load: str,
    prompts: Sequence[str],
    concurrency: Sequence[int],
    tokens: int,
    seconds: float,
    question: str = "closed",
) -> list[Measurement]:
    """A window at each number of requests."""
    shared = {"prompts": prompts, "tokens": tokens, "seconds": seconds}
    return [
        Measurement(load, count, question, shared | {"concurrency": count}) for count in concurrency
    ]


def plan_round(
    workload: Workload, prompts: Sequence[str], round_number: int, plain_rates: Mapping[int, float]
) -> list[Measurement]:
    """Everything one round measures; `plain_rates` are tokens per second by concurrency."""
    easy = in_order_of_round(prompts, round_number)
    tokens, seconds = workload.tokens, workload.seconds
    plan: list[Measurement] = []
    for load in workload.loads:
        if load == SWING:
            phases = [(count, round(plain_rates[count] * seconds)) for count in workload.phases]
            asked: dict[str, Any] = {"prompts": easy, "tokens": tokens, "phases": phases}
            plan.append(Measurement(load, None, "swing", asked))
        elif load == POISSON:
            for rate in workload.rates:
                per_second = rate * plain_rates[SATURATION] / tokens
                count = max(2, round(per_second * POISSON_WINDOWS * seconds))
                arrivals = poisson_arrivals(per_second, count, f"arrivals {round_number}")
                asked = {"prompts": easy_and_hard(easy), "tokens": tokens, "arrivals": arrivals}
                plan.append(Measurement(load, rate, "poisson", asked))
        else:
            own = in_order_of_round(TEXTS[load](), round_number) if load in TEXTS else easy
            own = easy_and_hard(own) if load == MIXED else own
            plan += plan_closed(load, own, workload.concurrency, tokens, seconds)
    return plan


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


def plan_where(
    workload: Workload, prompts: Sequence[str], of_contexts: Sequence[Measurement]
) -> list[Measurement]:
    """What tells where the time goes: decoding alone, at each context or concurrency."""
    if workload.contexts:
        return [replace(one, question="where") for one in of_contexts]
    asked = workload.concurrency, workload.tokens, workload.seconds
    return plan_closed(CLOSED, prompts, *asked, question="where")
