"""What the scheduler tells all workers with a step: so that they decide alike, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_dflash.engine.message import Message
from vllm_dflash.planning.ahead import Learned


@dataclass(frozen=True)
class Directions:
    """How a step is to draft."""

    runs_block: bool
    """Whether the drafter's block is run behind it."""
    least: int = 0
    """Of the drafts that it makes, how many the next step verifies, whatever they seem worth."""
    could_draft: bool = True
    """Whether any request could have used drafts."""
    learned: Learned | None = None
    """What chances and budgets go by from now on, if that has changed."""


DIRECTIONS: Message[Directions] = Message("dflash_directions")
"""V2, scheduler to workers."""


def directions_of(step: SchedulerOutput) -> Directions:
    """In a worker; where nobody plans, every step that has room for drafts runs a block."""
    return DIRECTIONS.on(step) or Directions(runs_block=step.num_spec_tokens_to_schedule > 0)
