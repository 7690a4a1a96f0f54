"""Measures how many tokens a step must bring for drafting to pay, without a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.platforms import current_platform

from vllm_dflash.tools.bench.bench_plan import CONCURRENCY, Measurement, Workload
from vllm_dflash.tools.bench.bench_record import Record
from vllm_dflash.tools.bench.bench_report import Rounds, spread
from vllm_dflash.tools.bench.bench_setup import BenchSetup, distinct
from vllm_dflash.tools.bench.comparison import Comparison
from vllm_dflash.tools.bench.rejected_drafts import RejectedDrafts
from vllm_dflash.tools.bench.sides import NO_PLUGIN, PLAIN, Side
from vllm_dflash.tools.bench.step_answers import START
from vllm_dflash.tools.prompts import BUILT_IN, read_prompts
from vllm_dflash.tools.tables import Table

CONTEXT = "context {:,}"
"""Name of a load."""


def verifying_side(k: int) -> Side:
    """Make the side that verifies K drafts in each step, none of which is accepted."""
    config: dict[str, Any] = {"num_speculative_tokens": k}
    if current_platform.is_cpu():
        config["model"] = f"{RejectedDrafts.__module__}.{RejectedDrafts.__name__}"
        config["method"] = "custom_class"
    else:  # on Model Runner V2 a text without a match is drafted, too
        config |= {"method": "ngram_gpu", "rejection_sample_method": "synthetic"}
        config["synthetic_acceptance_rates"] = [0.0] * k
    return Side(f"verify K={k}", "beside", NO_PLUGIN, config)


@dataclass(frozen=True)
class StepsWorkload(Workload):
    """Steps at each number of requests and each length of their contexts."""

    contexts: tuple[int, ...] = ()

    @property
    def seconds_of_round(self) -> float:
        """Approximate seconds per round on one engine, without those that read prompts."""
        return len(self.contexts) * len(self.concurrency) * self.seconds

    def plan_round(self, prompts: Any, round_number: int) -> list[Measurement]:
        """Plan a round; all are equal. `prompts`: see `Workload.plan_round`."""
        asked = {"prompts": prompts[""], "tokens": self.tokens, "seconds": self.seconds}
        return [
            Measurement(
                CONTEXT.format(context),
                count,
                "steps",
                asked | {"context": context, "concurrency": count},
            )
            for context in self.contexts
            for count in self.concurrency
        ]


@dataclass
class BreakEvenRecord(Record):
    """The record of a comparison of steps."""

    can_plot = False

    def break_even(self, side: str, load: str, count: Any) -> Rounds:
        """Return tokens a step must bring: its time / that of a plain step, [rounds]."""
        verified, plain = (
            self.results.rounds(load, count, name, "step_seconds") for name in (side, PLAIN)
        )
        return verified / plain

    @property
    def tables(self) -> list[Table]:
        """Tables of `result.md`: one for each K."""
        return [self._table(side) for side in self.results.of_kind("beside")]

    @property
    def interim(self) -> list[Table]:
        """Tables to print between rounds."""
        return self.tables

    @property
    def notes(self) -> list[str]:
        """A sentence that says how to read the tables."""
        side, load = self.results.of_kind("beside")[0], self.results.loads[0]
        count = self.results.settings(load)[-1]
        tokens = np.median(self.break_even(side.name, load, count))
        return [
            f"{side.draft_length}: a drafter whose block costs nothing must bring more than"
            f" {tokens:.2f} tokens a step (1 + accepted drafts) at {count} requests, {load};"
            " its own block comes on top."
        ]

    def _table(self, side: Side) -> Table:
        results, name = self.results, side.name
        rows = [
            [str(count), *(spread(self.break_even(name, load, count)) for load in results.loads)]
            for count in results.settings(results.loads[0])
        ]
        title = f"{side.draft_length}: tokens a step must bring, median of rounds (min - max)"
        return Table(title, [CONCURRENCY, *results.loads], rows)


class BreakEvenComparison(Comparison):
    """Times steps, and checks that they were what they are called."""

    def _ask(self, side: Side, measurement: Measurement) -> dict[str, Any]:
        found = super()._ask(side, measurement)
        if side.draft_tokens is not None:
            check_counts(found["result"], side.draft_tokens, measurement.arguments["concurrency"])
        return found


def check_counts(result: dict[str, Any], k: int, requests: int) -> None:
    """Check that each request verified K drafts in each step, and accepted none.

    Raises:
        ValueError: it is otherwise, so the times would say nothing.
    """
    counts, all_drafts = result["counts"], k * requests * result["steps"]
    if counts["draft_tokens"] != all_drafts or counts["accepted_tokens"]:
        raise ValueError(
            f"vLLM verified {counts['draft_tokens']:.0f} drafts of {all_drafts} and accepted"
            f" {counts['accepted_tokens']:.0f}, so these steps cannot be compared: raise"
            " --max-model-len, or lower --concurrency or K."
        )


class BreakEvenSetup(BenchSetup):
    """Builds the comparison of steps."""

    record_class, comparison_class = BreakEvenRecord, BreakEvenComparison

    def choose_workload(self) -> StepsWorkload:
        """Make the workload."""
        common = {**vars(super().choose_workload()), "loads": (), "files": ("",)}
        return StepsWorkload(**common, contexts=distinct(self.parsed.context))

    def check(self) -> None:
        """Check that the arguments go together."""
        super().check()
        parsed = self.parsed
        given = {
            "--drafter": parsed.drafter,
            "--beside": parsed.beside,
            "--dataset-name": parsed.dataset_name,
            "--temperature": any(parsed.temperature),
        }
        if wrong := [name for name, value in given.items() if value]:
            raise ValueError(
                f"--break-even measures without a drafter: leave out {', '.join(wrong)}."
            )

    @property
    def max_model_len(self) -> int:
        """Room for the longest context, twice the steps, and K."""
        parsed = self.parsed
        needed = max(parsed.context) + 2 * parsed.tokens + max(parsed.break_even)
        return max(parsed.max_model_len, needed)

    def engine_arguments(self, target: str) -> dict[str, Any]:
        """Return vLLM's arguments of every engine: with statistics; prompts are read once."""
        engine = super().engine_arguments(target)
        del engine["enable_prefix_caching"]
        return engine | {"disable_log_stats": False}

    def process_arguments(self) -> dict[str, Any]:
        """Return arguments of every engine's process."""
        return {"start": START}

    def comparison(self) -> Comparison:
        """Build the comparison."""
        parsed = self.parsed
        texts = [text for file in parsed.prompts or [BUILT_IN] for text in read_prompts(file)]
        sides = [Side(PLAIN, "plain", NO_PLUGIN, None)]
        sides += [verifying_side(k) for k in sorted({*parsed.break_even})]
        parsed.out.mkdir(parents=True, exist_ok=True)
        target = parsed.target or self.choose_pair().target
        return self.build(sides, target, target, {"": texts})
