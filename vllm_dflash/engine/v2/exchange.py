"""What V2's scheduler and its workers tell each other: with a step, with its output, and once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_dflash.engine.estimates_file import Memory
from vllm_dflash.engine.message import Message
from vllm_dflash.engine.reporting.log import logger
from vllm_dflash.planning import Ints
from vllm_dflash.planning.ahead import TEXT, Learned, Outcomes
from vllm_dflash.planning.costs import StepCosts


@dataclass(frozen=True)
class Directions:
    """How a step is to draft: the same for all workers, so that they decide alike."""

    runs_block: bool
    """Whether the drafter's block is run behind it."""
    least: int = 0
    """Of the drafts that it makes, how many the next step verifies, whatever they seem worth."""
    could_draft: bool = True
    """Whether any request could have used drafts."""
    learned: Learned | None = None
    """What chances and budgets go by from now on, if that has changed."""


@dataclass(frozen=True)
class WorkerFacts:
    """What a worker finds out while it starts, and the scheduler plans by."""

    costs: StepCosts
    lengths: Sequence[int]
    """Draft lengths that all requests of a step can be given alike, 0 and K among them."""
    trims: bool = False
    """Whether the device drops drafts that are not worth verifying."""
    ragged_seconds: float = 0.0
    """What a step takes longer whose requests were given different lengths."""
    looks_up: bool = False
    """Whether texts are looked up."""
    memory: Memory | None = None
    """What an earlier engine had learned, and where to keep what this one does."""


DIRECTIONS: Message[Directions] = Message("dflash_directions")
"""Scheduler to workers, with a step."""
OUTCOMES: Message[Outcomes] = Message("dflash_outcomes")
"""Worker to scheduler, with its output: of the output's requests, in its order."""
FACTS: Message[WorkerFacts] = Message("dflash_facts")
"""Worker to scheduler, with the first sampled tokens."""


def directions_of(step: SchedulerOutput) -> Directions:
    """In a worker; where nobody plans, every step that has room for drafts runs a block."""
    return DIRECTIONS.on(step) or Directions(runs_block=step.num_spec_tokens_to_schedule > 0)


def free_ones(outcomes: Outcomes) -> Ints:
    """Drafts of each request that were verified and that its text had predicted, [R]."""
    return np.where(outcomes.source == TEXT, outcomes.admitted, 0)


def log_lengths(facts: WorkerFacts, untrimmed: str | None) -> None:
    """The line that says how draft lengths vary; `untrimmed`: why the device does not trim drafts,
    None if it does."""
    how = "drafts are made or not, and vLLM's adaptive verification trims each request's"
    if untrimmed is not None:
        more = f"{1000 * facts.ragged_seconds:.2f} ms more"
        how = (
            f"the same for all requests of a step, or each its own, for {more};"
            f" adaptive verification is off: {untrimmed}"
        )
    logger().info("draft lengths %s (%s)", ", ".join(map(str, facts.lengths)), how)
