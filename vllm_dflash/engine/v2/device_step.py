"""A step on V2: the device decides.

Behind the target's, top to bottom (`run`); each line a kernel or a captured graph, none of which
the host waits for:

    forget    what slots hold that have gone to new requests                 (draft_slots.py)
    grade     what became of the drafts that each request's slot holds       (grading.py)
    report    that goes to the host, which counts it and plans by it         (exchange.py)
    block     the drafter: context stored, a block drafted, judged           (vLLM's graph)
    look up   what the requests' own texts predict                           (text_look_up.py)
    choose    whose drafts each request gets, with a chance for each         (choice.py)
    grow      trees of these, where drafts may be trees                      (draft_trees.py)

The scheduler says whether a block is run, and for how many drafts there are places
(`scheduling.py`). Where attention backends allow it, vLLM then trims the drafts of the batch on the
device, by their chances, to a budget of ours (`trimming.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_dflash.engine.v2.choice import choose
from vllm_dflash.engine.v2.draft_slots import Batch, Drafts, DraftSlots
from vllm_dflash.engine.v2.exchange import HostCopy
from vllm_dflash.engine.v2.grading import OUTCOME_COLUMNS, grade
from vllm_dflash.engine.v2.text_look_up import TextLookUp
from vllm_dflash.engine.v2.trees.draft_trees import DraftTrees


class DeviceStep:
    """What the device knows of all requests, and what a step does with it."""

    def __init__(
        self,
        num_slots: int,
        drafts: Drafts,
        texts: TextLookUp | None,
        trees: DraftTrees | None = None,
    ) -> None:
        """For S slots; `drafts` are of a batch. `texts` gives free drafts, `trees` make trees of a
        block's; None: there are none."""
        width, device = drafts.tokens.shape[1], drafts.tokens.device
        self.slots = DraftSlots(num_slots, width, device)
        self.drafts, self.texts, self.trees = drafts, texts, trees
        self.outcomes = torch.zeros(num_slots, OUTCOME_COLUMNS + width, device=device)
        self.copy_stream: torch.cuda.Stream | None = None
        """vLLM's, for outputs."""
        self.report: HostCopy | None = None
        """What became of the last step's drafts, on the way to the host."""

    def owners(self) -> tuple[object, ...]:
        """Owners of all persistent tensors."""
        trees = self.trees
        of_trees = () if trees is None else (trees, trees.slots, trees.candidates)
        return self, self.slots, self.texts, *of_trees

    def run(self, batch: Batch, fresh: torch.Tensor | None, run_block: Callable[[], bool]) -> None:
        """Decide what each request of a batch is to have verified next.

        Args:
            batch: of R requests.
            fresh: slots of new requests, [N] int64; what drafts these have are placeholders.
            run_block: stores context, and writes tokens and confidence of a block, if it says so.
        """
        if fresh is not None:
            self.slots.forget(fresh)
        chains = None if self.trees is None else self.trees.slots.chains
        if self.report is not None:
            self.report.before_writing()
        grade(self.slots, batch, self.outcomes, chains)
        self.report = HostCopy(self.outcomes[: len(batch.slots)], self.copy_stream)
        has_block = run_block()
        if self.texts is not None:
            self.texts.look_up(batch)
        choose(self.slots, batch, self.drafts, self.texts, has_block=has_block)
        if self.trees is not None:
            self.trees.grow(self.slots, batch, self.drafts, has_block=has_block)
