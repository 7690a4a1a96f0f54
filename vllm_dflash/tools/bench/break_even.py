"""Measures how many tokens a step must bring for drafting to pay, without a drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.platforms import current_platform

from vllm_dflash.tools.bench.bench_plan import CONCURRENCY, Measurement, Workload
from vllm_dflash.tools.bench.bench_record import Record
from vllm_dflash.tools.bench.bench_report import Results, Rounds, Setting, spread
from vllm_dflash.tools.bench.bench_setup import BenchSetup, distinct
from vllm_dflash.tools.bench.comparison import Comparison
from vllm_dflash.tools.bench.rejected_drafts import RejectedDrafts
from vllm_dflash.tools.bench.sides import NO_PLUGIN, PLAIN, Side
from vllm_dflash.tools.bench.step_answers import START
from vllm_dflash.tools.prompts import BUILT_IN, read_prompts
from vllm_dflash.tools.tables import Table

DRAFT_LENGTHS = [3, 7, 15]
"""K of the steps, if the user names none."""


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

    def plan_round(
        self, prompts: Mapping[str, Sequence[str]], round_number: int
    ) -> list[Measurement]:
        """Plan a round; all are equal. `prompts`: see `Workload.plan_round`."""
        asked = {"prompts": prompts[""], "tokens": self.tokens, "seconds": self.seconds}
        return [
            Measurement(
                f"context {context:,}",
                count,
                "steps",
                asked | {"context": context, "concurrency": count},
            )
            for context in self.contexts
            for count in self.concurrency
        ]


class BreakEvenResults(Results):
    """Times of steps."""

    def tables(self, load: str) -> list[Table]:
        """Make all tables of a load."""
        return [self.interim_table(load)]

    def interim_table(self, load: str) -> Table:
        """Make the table of a context, by number of requests and K."""
        sides = self.of_kind("beside")
        rows = []
        for count in self.settings(load):
            plain = 1000 * np.median(self.rounds(load, count, PLAIN, "step_seconds"))
            ratios = [spread(self.break_even(load, count, side)) for side in sides]
            rows.append([str(count), f"{plain:.1f} ms", *ratios])
        title = f"{load}: tokens a step must bring (1 + accepted drafts), without the drafter's own"
        title += " time; median of rounds (min - max)"
        heads = [CONCURRENCY, "a plain step", *(side.draft_length for side in sides)]
        return Table(title, heads, rows)

    def break_even(self, load: str, count: Setting, side: Side) -> Rounds:
        """Return the time of a side's step / that of a plain step, [rounds]."""
        verified, plain = (
            self.rounds(load, count, name, "step_seconds") for name in (side.name, PLAIN)
        )
        return verified / plain


@dataclass
class BreakEvenRecord(Record):
    """The record of a comparison of steps."""

    can_plot = False

    @property
    def results(self) -> Results:
        """Results of complete rounds."""
        return BreakEvenResults(self.sides, self.measurements)


class BreakEvenSetup(BenchSetup):
    """Builds the comparison of steps."""

    record_class = BreakEvenRecord

    def choose_workload(self) -> StepsWorkload:
        """Make the workload."""
        parsed = self.parsed
        return StepsWorkload(
            loads=(),
            concurrency=distinct(parsed.concurrency),
            tokens=parsed.tokens,
            seconds=parsed.seconds,
            contexts=distinct(parsed.context),
        )

    def check(self) -> None:
        """Check that the arguments go together."""
        super().check()
        parsed = self.parsed
        given = {
            "--drafter": parsed.drafter,
            "--beside": parsed.beside,
            "--dataset-name": parsed.dataset_name,
            "--temperature": any(parsed.temperature),
            "--quick": parsed.quick,
        }
        if wrong := [name for name, value in given.items() if value]:
            raise ValueError(
                f"--break-even only times steps, without a drafter: leave out {', '.join(wrong)}."
            )

    @property
    def draft_lengths(self) -> list[int]:
        """K of each engine that verifies drafts."""
        return sorted({*(self.parsed.break_even or DRAFT_LENGTHS)})

    @property
    def max_model_len(self) -> int:
        """Room for the longest context, twice the steps, and K."""
        parsed = self.parsed
        needed = max(parsed.context) + 2 * parsed.tokens + self.draft_lengths[-1]
        return max(parsed.max_model_len, needed)

    def engine_arguments(self, target: str) -> dict[str, Any]:
        """Return vLLM's arguments of every engine: with statistics; prompts are read once."""
        engine = super().engine_arguments(target)
        del engine["enable_prefix_caching"]
        return engine | {"disable_log_stats": False}

    def process_arguments(self) -> dict[str, Any]:
        """Return arguments of every engine's process."""
        if not current_platform.is_cpu():
            return {"start": START}
        # Where there is Triton, plain decoding would get V2, which has no custom proposers.
        return {"start": START, "environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}

    def comparison(self) -> Comparison:
        """Build the comparison."""
        parsed = self.parsed
        room = f"requests have room for {self.max_model_len:,} tokens"
        self.progress.say(
            f"{room}: the longest --context, --tokens twice, and K, or --max-model-len"
        )
        texts = [text for file in parsed.prompts or [BUILT_IN] for text in read_prompts(file)]
        sides = [Side(PLAIN, "plain", NO_PLUGIN, None), *map(verifying_side, self.draft_lengths)]
        parsed.out.mkdir(parents=True, exist_ok=True)
        target = parsed.target or self.choose_pair().target
        return self.build(sides, target, target, {"": texts})
