"""What a worker of Model Runner V2 finds out while it starts, and the scheduler plans by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_dflash.engine.estimates_file import EstimatesFile
from vllm_dflash.engine.message import Message
from vllm_dflash.engine.reporting.log import logger
from vllm_dflash.planning.costs import StepCosts


@dataclass(frozen=True)
class WorkerFacts:
    """Sent once."""

    costs: StepCosts
    lengths: Sequence[int]
    """Draft lengths that all requests of a step can be given alike, 0 and K among them."""
    trims: bool = False
    """Whether the device drops drafts that are not worth verifying."""
    ragged_seconds: float = 0.0
    """What a step takes longer whose requests were given different lengths."""
    looks_up: bool = False
    """Whether texts are looked up."""
    memory: EstimatesFile | None = None
    """What an earlier engine had learned, and where to keep what this one does."""


FACTS: Message[WorkerFacts] = Message("dflash_facts")
"""V2, worker to scheduler, with the first sampled tokens."""


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
