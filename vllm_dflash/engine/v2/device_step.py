"""A step on V2, decided on the device.

After the target, in order (`speculator.propose`); the host waits for none of them. (With trees,
`DraftTrees.settle` moves what was accepted before all else.)

    forget    clear the slots of new requests                                (draft_slots.py)
    grade     see which of each slot's drafts were accepted                  (grading.py)
    report    send that to the host, which counts it and plans by it         (exchange.py)
    block     store context, draft a block, compute its confidence           (vLLM's graph)
    look up   find what the requests' own texts predict                      (text_look_up.py)
    choose    pick block or text for each request, and rate each draft       (choice.py)
    grow      make trees of the drafts, if they may be trees                 (draft_trees.py)

The scheduler decides whether a block runs and how many places there are for drafts
(`v2_scheduler.py`). If the attention backends allow it, vLLM then trims the batch's drafts on the
device, by their chances, to our budget (`trimming.py`).
"""

from __future__ import annotations

import torch

from vllm_dflash.engine.v2.choice import choose
from vllm_dflash.engine.v2.draft_slots import Batch, Drafts, DraftSlots
from vllm_dflash.engine.v2.exchange import HostCopy
from vllm_dflash.engine.v2.grading import OUTCOME_COLUMNS, grade
from vllm_dflash.engine.v2.text_look_up import TextLookUp
from vllm_dflash.engine.v2.trees.draft_trees import DraftTrees


class DeviceStep:
    """Device state of all requests, and the step that updates it."""

    def __init__(
        self,
        num_slots: int,
        drafts: Drafts,
        texts: TextLookUp | None,
        trees: DraftTrees | None = None,
    ) -> None:
        """Allocate S slots.

        `texts`: source of free drafts, if any; `trees`: makes trees of a block's drafts, if any.
        """
        width, device = drafts.tokens.shape[1], drafts.tokens.device
        self.slots = DraftSlots(num_slots, width, device)
        self.drafts, self.free_drafts, self.trees = drafts, texts, trees
        self.outcomes = torch.zeros(num_slots, OUTCOME_COLUMNS + width, device=device)
        self.copy_stream: torch.cuda.Stream | None = None
        """vLLM's stream for copying outputs to the host."""
        self.report: HostCopy | None = None
        """Outcomes of the last step's drafts, on the way to the host."""

    def owners(self) -> tuple[object, ...]:
        """Owners of all persistent tensors."""
        trees = self.trees
        of_trees = () if trees is None else (trees, trees.slots, trees.candidates)
        return self, self.slots, self.free_drafts, *of_trees

    def before_block(self, batch: Batch, fresh: torch.Tensor | None) -> None:
        """Grade the last drafts of a batch, and report what became of them.

        Args:
            batch: R requests.
            fresh: slots of new requests, [N] int64; their drafts are placeholders. None: no new
                requests.
        """
        if fresh is not None:
            self.slots.forget(fresh)
        chains = None if self.trees is None else self.trees.slots.chains
        if self.report is not None:
            self.report.before_writing()
        grade(self.slots, batch, self.outcomes, chains)
        self.report = HostCopy(self.outcomes[: len(batch.slots)], self.copy_stream)

    def after_block(self, batch: Batch, *, has_block: bool) -> None:
        """Choose the next drafts of a batch; `has_block`: whether a block was drafted for it."""
        if self.free_drafts is not None:
            self.free_drafts.look_up(batch)
        choose(self.slots, batch, self.drafts, self.free_drafts, has_block=has_block)
        if self.trees is not None:
            self.trees.grow(self.slots, batch, self.drafts, has_block=has_block)
