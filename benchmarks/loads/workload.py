"""Plans the measurements of each round, of all loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random
from types import MappingProxyType
from typing import Any

from loads.texts import TEXTS, easy_and_hard, turns_of_agents
from vllm_dflash.tools.bench.bench_plan import (
    CLOSED,
    CONCURRENCY,
    Measurement,
    Workload,
    in_order_of_round,
)

MIXED, SWING = "mixed", "swing"
SHORT, ARRIVALS = "short", "arrivals"
AGENT = "agent"
LOADS = {
    CLOSED: "a fixed number of requests in flight",
    MIXED: "like closed; every other prompt has shuffled words, which are hard to draft for",
    "edit": "like closed, with its own prompts: source code to repeat with a change",
    "quote": "like closed, with its own prompts: passages to quote from",
    "prose": "like closed, with its own prompts: passages to continue, with little repetition",
    SWING: "a number of requests in flight that changes from phase to phase",
    SHORT: "a list of requests with answers of 16 to 96 tokens, a fixed number in flight",
    AGENT: "--turns of conversations that grow, with a file to repeat in each; earlier turns are"
    " in the prefix cache",
    ARRIVALS: "like short, arriving at random (Poisson) at --shares of what plain decoding serves",
}
CLOSED_LOADS = (CLOSED, MIXED, *TEXTS)
"""Loads with a fixed number of requests in flight."""
SERVED = (SHORT, ARRIVALS)
"""Loads that are lists of short requests, whose waiting times are reported."""
SHORTEST, LONGEST = 16, 96
"""Tokens of their answers."""
MEAN_ANSWER = (SHORTEST + LONGEST) / 2
TURN = 1100
"""Most tokens that a turn of `agent` adds to its conversation, answer included."""
CONTEXT = "context"
"""Prefix of the names of loads whose settings are tokens of context."""
SHORTER_BY = 32
"""Step, in tokens, by which a long prompt is shortened to get different texts."""
FROM_THE_END = 64
"""Tokens to keep free before the context limit, near which some drafters stop drafting."""
Rates = Mapping[int, float]
"""Plain decoding's tokens per second by concurrency."""
UNKNOWN: Rates = MappingProxyType({})


def setting_name(load: str) -> str:
    """Return what the settings of a load are, for heads of tables."""
    if load.startswith(CONTEXT):
        return CONTEXT
    if load.startswith(AGENT):
        return "turn"
    return {SWING: "phase: requests", ARRIVALS: "% of plain's maximum"}.get(load, CONCURRENCY)


def measurement(
    load: str, setting: int | None, question: str, arguments: dict[str, Any]
) -> Measurement:
    """Make a measurement; None as its setting is the swing as a whole."""
    return Measurement(load, setting, question, arguments, setting_name(load))


@dataclass(frozen=True)
class LoadsWorkload(Workload):
    """What to measure in every round: any of `LOADS`, or decoding at contexts."""

    phases: tuple[int, ...] = ()
    """Concurrencies of the swing's phases, in order."""
    contexts: tuple[int, ...] = ()
    """Prompt lengths at which decoding is measured, instead of loads."""
    shares: tuple[int, ...] = ()
    """Rates of arrivals, in percent of the most requests per second that plain decoding serves."""
    turns: int = 0
    """Turns of each conversation of `agent`."""
    where: bool = False
    """Whether to measure where the time goes; needs `TimedSteps` as worker extension."""

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
            times *= self.turns if load == AGENT else 1
            windows += times * len(settings.get(load, self.concurrency))
        return windows * self.seconds

    def room_for(self, context: int) -> int:
        """Return the tokens that a request with this much context may need in an engine."""
        return context + 2 * self.tokens + FROM_THE_END

    def plan_round(
        self,
        prompts: Mapping[str, Sequence[str]],
        round_number: int,
        plain_rates: Rates = UNKNOWN,
        served_rates: Rates = UNKNOWN,
    ) -> list[Measurement]:
        """Plan the loads of a round.

        `prompts`: prompts by name of their file. `plain_rates`: those of the closed load.
        `served_rates`: the same for short answers, including the time for their prompts.
        """
        plan: list[Measurement] = []
        seed = str(round_number)
        texts = in_order_of_round([*chain(*prompts.values())], round_number)
        for load in self.loads:
            if load == SWING:
                tokens = [round(plain_rates[count] * self.seconds) for count in self.phases]
                phases = list(zip(self.phases, tokens, strict=True))
                asked = {"prompts": texts, "tokens": self.tokens, "phases": phases}
                plan.append(measurement(load, None, "swing", asked))
            elif load == SHORT:
                rates = {count: served_rates[count] for count in self.concurrency}
                plan += self.plan_short(texts, seed, rates)
            elif load == AGENT:
                plan += self.plan_agents(seed)
            elif load == ARRIVALS:
                plan += self.plan_arrivals(texts, seed, served_rates[max(self.concurrency)])
            else:
                files = {"": TEXTS[load]()} if load in TEXTS else prompts
                each = {name: in_order_of_round(one, round_number) for name, one in files.items()}
                if load == MIXED:
                    each = {name: easy_and_hard(one) for name, one in each.items()}
                plan += self.plan_with_each(load, each)
        return plan

    def plan_short(self, prompts: Sequence[str], seed: str, rates: Rates) -> list[Measurement]:
        """Plan a list of short answers per concurrency.

        `rates`: those expected. A list has as many answers as its rate serves in a window, and at
        least two per request in flight.
        """
        plan = []
        for count, rate in rates.items():
            answers = short_answers(seed, max(round(rate * self.seconds / MEAN_ANSWER), 2 * count))
            asked = {"prompts": prompts, "answers": answers, "concurrency": count}
            plan.append(measurement(SHORT, count, "answers", asked))
        return plan

    def plan_agents(self, seed: str) -> list[Measurement]:
        """Plan the turns of as many conversations as there are requests in flight."""
        plan = []
        for count in self.concurrency:
            for turn, prompts in enumerate(turns_of_agents(count, self.turns, seed), 1):
                asked = {"prompts": prompts, "answers": [self.tokens] * count, "concurrency": count}
                plan.append(measurement(f"{AGENT}, {count} at a time", turn, "answers", asked))
        return plan

    def plan_arrivals(self, prompts: Sequence[str], seed: str, served: float) -> list[Measurement]:
        """Plan short answers that arrive at random, at each share of `served` tokens per second."""
        plan = []
        for share in self.shares:
            rate = served / MEAN_ANSWER * share / 100  # requests per second
            gaps = Random(f"arrivals {seed}")
            arrivals = [gaps.expovariate(rate)]
            while arrivals[-1] < self.seconds:
                arrivals.append(arrivals[-1] + gaps.expovariate(rate))
            answers = short_answers(seed, len(arrivals))
            asked = {"prompts": prompts, "answers": answers, "arrivals": arrivals}
            plan.append(measurement(ARRIVALS, share, "arrivals", asked))
        return plan

    def plan_decoding(self, prompts: Sequence[str]) -> list[Measurement]:
        """Plan decoding alone of the closed load, at each concurrency."""
        asked = {"prompts": prompts, "tokens": self.tokens, "seconds": self.seconds}
        return [
            measurement(CLOSED, count, "decoding", asked | {"concurrency": count})
            for count in self.concurrency
        ]

    def plan_contexts(self, texts: Sequence[Sequence[int]], room: float) -> list[Measurement]:
        """Plan decoding alone, at each context length and concurrency that fits the cache.

        `texts`: token ids of one text per request of the highest concurrency; they are cut or
        repeated to the context length. `room`: tokens that the engines' caches hold.
        """
        plan = []
        for count in self.concurrency:
            for length in self.contexts:
                if count * self.room_for(length) > room:
                    continue
                prompts = [
                    (list(text) * -(-length // len(text)))[:length] for text in texts[:count]
                ]
                asked = {
                    "prompts": prompts,
                    "concurrency": count,
                    "tokens": self.tokens,
                    "seconds": self.seconds,
                    "shorter": list(range(0, length // 8, SHORTER_BY)) or [0],
                }
                plan.append(measurement(f"{CONTEXT}, {count} at a time", length, "decoding", asked))
        return plan


def short_answers(seed: str, count: int) -> list[int]:
    """Draw the lengths of `count` answers, in tokens."""
    lengths = Random(f"answers {seed}")
    return [lengths.randint(SHORTEST, LONGEST) for _ in range(count)]
