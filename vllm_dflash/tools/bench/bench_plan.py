"""What a round measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_dflash.tools.bench.bench_prompts import cut_to, easy_and_hard, in_order_of_round
from vllm_dflash.tools.bench.repeating_text import edits, prose, quotes
from vllm_dflash.tools.loads.poisson import poisson_arrivals

CLOSED, MIXED, SWING, POISSON = "closed", "mixed", "swing", "poisson"
CONTEXT = "context"
"""How names of loads begin whose settings are tokens of context."""
TEXTS: dict[str, Callable[[], list[str]]] = {"edit": edits, "quote": quotes, "prose": prose}
"""Loads like `closed` that have prompts of their own."""
THROUGHPUT_LOADS = (CLOSED, MIXED, *TEXTS)
SATURATION = 16
"""Concurrency at which plain decoding's throughput is what rates are fractions of."""
WHERE = "where"
"""The question that tells where the time goes."""
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
    return "rate" if load == POISSON else "concurrency"


def title_of(load: str, setting: float | None) -> str:
    """A load at one of its settings."""
    if load == SWING:
        return SWING
    if load.startswith(CONTEXT):
        return f"{load}: {setting} tokens"
    return f"{load}, {setting_name(load)} {setting}"


def is_throughput(load: str) -> bool:
    """Whether tokens per second are what is measured."""
    return load in THROUGHPUT_LOADS or load.startswith(CONTEXT)


@dataclass(frozen=True)
class Workload:
    """What is asked of every engine."""

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
        saturation = (SATURATION,) if POISSON in self.loads else ()
        return sorted({*phases, *saturation})

    @property
    def highest_concurrency(self) -> int:
        """Requests in flight at most, as far as that is ours to say."""
        is_closed = self.contexts or {*self.loads} & {*THROUGHPUT_LOADS}
        return max(*(self.concurrency if is_closed else ()), *self.calibrated, 1)

    def room_for(self, context: int) -> int:
        """Tokens that an engine must be able to take for a request of such a context."""
        return context + 2 * self.tokens + FROM_THE_END

    @property
    def seconds_of_round(self) -> float:
        """Of one side in one round, in windows and phases alone."""
        rates = dict.fromkeys(self.calibrated, 1.0)  # they make a load larger, not longer
        plan = plan_round(self, [], 0, rates)
        windows = len(self.contexts) * len(self.concurrency)
        return sum(one.expected_seconds for one in plan) + windows * self.seconds


@dataclass(frozen=True)
class Measurement:
    """One question to every engine."""

    load: str
    setting: float | None
    """A concurrency or a rate; the swing has only one setting."""
    question: str
    arguments: dict[str, Any]
    expected_seconds: float

    def __str__(self) -> str:
        return title_of(self.load, self.setting)


def plan_round(
    workload: Workload, prompts: Sequence[str], round_number: int, plain_rates: Mapping[int, float]
) -> list[Measurement]:
    """Everything one round measures; `plain_rates` are tokens per second by concurrency."""
    easy = in_order_of_round(prompts, round_number)
    mixed = easy_and_hard(easy)
    tokens, seconds = workload.tokens, workload.seconds
    plan: list[Measurement] = []
    for load in workload.loads:
        if load in THROUGHPUT_LOADS:
            own = mixed if load == MIXED else easy
            if load in TEXTS:
                own = in_order_of_round(TEXTS[load](), round_number)
            shared = {"prompts": own, "tokens": tokens, "seconds": seconds}
            plan += [
                Measurement(load, count, "closed", shared | {"concurrency": count}, seconds)
                for count in workload.concurrency
            ]
        elif load == SWING:
            phases = [(count, round(plain_rates[count] * seconds)) for count in workload.phases]
            arguments = {"prompts": easy, "tokens": tokens, "phases": phases}
            plan.append(Measurement(load, None, "swing", arguments, len(phases) * seconds))
        elif load == POISSON:
            length = POISSON_WINDOWS * seconds
            for rate in workload.rates:
                per_second = rate * plain_rates[SATURATION] / tokens
                count = max(2, round(per_second * length))
                arrivals = poisson_arrivals(per_second, count, f"arrivals {round_number}")
                arguments = {"prompts": mixed, "tokens": tokens, "arrivals": arrivals}
                plan.append(Measurement(load, rate, "poisson", arguments, length))
    return plan


def plan_contexts(
    workload: Workload, texts: Sequence[Sequence[int]], room: float
) -> list[Measurement]:
    """Decoding alone, at each length of context and concurrency for which there is room.

    Args:
        workload: with its contexts.
        texts: tokens, as many as the highest concurrency has requests.
        room: tokens that the engines' caches hold.
    """
    plan = []
    for count in workload.concurrency:
        for length in workload.contexts:
            if count * workload.room_for(length) > room:
                continue
            arguments = {
                "prompts": [cut_to(text, length) for text in texts[:count]],
                "concurrency": count,
                "tokens": workload.tokens,
                "seconds": workload.seconds,
                "shorter": list(range(0, length // 8, SHORTER_BY)) or [0],
            }
            load = f"{CONTEXT}, {count} at a time"
            plan.append(Measurement(load, length, "decoding", arguments, workload.seconds))
    return plan


def plan_where(
    workload: Workload, prompts: Sequence[str], of_contexts: Sequence[Measurement] = ()
) -> list[Measurement]:
    """What tells where the time goes: decoding alone, at each context or concurrency."""
    if workload.contexts:
        return [replace(one, question=WHERE) for one in of_contexts]
    shared = {"prompts": prompts, "tokens": workload.tokens, "seconds": workload.seconds}
    return [
        Measurement(CLOSED, count, WHERE, shared | {"concurrency": count}, workload.seconds)
        for count in workload.concurrency
    ]
