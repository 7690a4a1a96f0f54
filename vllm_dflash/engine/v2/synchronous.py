"""Draft lengths under synchronous scheduling: planned here request by request, as on V1.

The host needs two things of the device in every step: what was sampled, to plan, and how sure the
drafter is of each token, to cut. On a GPU the first arrives while the second is being made: where
the last step drafted, this step's block is launched before anybody has looked. If the plan then
says that nobody drafts, that one block was for nothing; the next is not launched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dflash.engine.block_layout import draft_limits
from vllm_dflash.engine.length_control import NO_CONFIDENCE, LengthControl
from vllm_dflash.engine.padding import have_own_drafts
from vllm_dflash.engine.text_drafts import TextDrafts
from vllm_dflash.engine.v2.device_trees import DeviceTrees
from vllm_dflash.engine.v2.host_copy import HostCopy
from vllm_dflash.planning import Ints
from vllm_dflash.planning.step import Step


class SynchronousLengths:
    """Runs a step's block, or does not, and tells the scheduler how many of its drafts count."""

    def __init__(
        self,
        lengths: LengthControl,
        width: int,
        confidence: torch.Tensor | None,
        *,
        runs_ahead: bool,
    ) -> None:
        """Ask `lengths` for blocks of `width` tokens (K), and read `confidence` [max R, K] when a
        block has written it, if one does.

        With `runs_ahead`, the device works while the host plans. A block's time is then that from
        the target's end to its own, the planning meanwhile included.
        """
        self.lengths = lengths
        self.width = width
        self.runs_ahead = runs_ahead
        self.step: Step | None = None
        """The one that runs."""
        self.texts: TextDrafts | None = None
        """What gives free drafts, if anything does."""
        self.trees: DeviceTrees | None = None
        """What makes trees of drafts, if anything does."""
        self._all_texts: Ints = np.zeros((0, 0), np.int32)
        self._confidence = confidence
        self._drafted_last = False
        self._handed_over: dict[str, int] = {}

    def read_texts(self, texts: TextDrafts, all_texts: Ints) -> None:
        """From now on look up free drafts in texts as the runner has them, [requests, tokens]."""
        self.texts, self._all_texts = texts, all_texts

    def propose(
        self,
        run: Callable[[bool], torch.Tensor],
        batch: InputBatch,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *,
        most: int,
        limits: Ints,
        newly_admitted: Collection[str],
    ) -> torch.Tensor:
        """Drafts of the batch, [R, K], of which those count that `cut` leaves.

        Args:
            run: stores the step's context and returns drafts; told whether the block is to run.
            batch: vLLM's.
            num_sampled: tokens that each request got, [R] on the device.
            num_rejected: drafts that it lost, the same.
            most: drafts the scheduler takes of each.
            limits: tokens each may come to, [R].
            newly_admitted: requests whose drafts in this step are vLLM's placeholders.
        """
        outcome = HostCopy(torch.stack([num_sampled, num_rejected]))  # [2, R]
        is_ahead = self.runs_ahead and self._drafted_last and most > 0
        drafts = run(True) if is_ahead else None
        # For the target, not for the block behind it.
        produced, rejected = outcome.wait().astype(np.int64)
        step = self.step = Step(batch.req_ids, produced, rows=batch.num_tokens)
        with step.timing("draft") if is_ahead else nullcontext():
            if batch.num_draft_tokens_per_req is not None:
                own = have_own_drafts(step.ids, newly_admitted)
                verified = np.where(step.decoding, batch.num_draft_tokens_per_req * own, 0)
                step.verified = verified.astype(np.int64)
                if self.trees is not None and batch.num_draft_tokens:
                    step.likeliest = self.trees.fate(step.produced)
                self.lengths.observe_verification(step)
            context = batch.num_computed_tokens_np + batch.num_scheduled_tokens - rejected
            step.context_lens = context.astype(np.int64)
            resting = self.lengths.take_skip(step)
            if self.texts is not None:
                places = batch.idx_mapping_np.astype(np.int64)
                with step.timing("planning"):
                    self.texts.look_up(step, self._all_texts, places, limits)
            if not resting:
                width = min(most, self.width)
                step.limits = draft_limits(context, limits, width, step.decoding)
            if not resting or step.foretold is not None:
                self.lengths.plan(step)
        is_drafted = step.plan.width > 0
        if is_drafted or is_ahead:
            step.draft_rows = step.num_requests * (1 + self.width)
            step.drafts_everybody = True
            with step.timing("draft"):
                drafts = run(True) if drafts is None else drafts
                confidence = self._read_confidence(step.num_requests)
        drafts = run(False) if drafts is None else drafts
        if is_drafted:
            if self.texts is not None and step.plan.uses_text:
                requests = np.nonzero(step.plan.drafted)[0]
                self.texts.compare(step, requests, drafts.cpu().numpy()[requests].tolist())
            drafts = self._choose(step, confidence, drafts)
        elif step.plan.uses_text:
            self.lengths.choose(step, np.zeros_like(step.limits), NO_CONFIDENCE)
        if self.texts is not None:
            for request in np.nonzero(step.from_text)[0].tolist():
                tokens = self.texts.tokens(request, int(step.lengths[request]))
                drafts[request, : len(tokens)] = torch.tensor(tokens)
        self._drafted_last = is_drafted
        self._handed_over = dict(zip(step.ids, step.lengths.tolist(), strict=True))
        return drafts

    def _read_confidence(self, num_requests: int) -> np.ndarray:
        """Of the block that runs, [R, K]. Waits for it."""
        if self._confidence is None:
            return np.ones((num_requests, self.width))
        return self._confidence[:num_requests].cpu().numpy()

    def _choose(self, step: Step, confidence: np.ndarray, drafts: torch.Tensor) -> torch.Tensor:
        """Of the block's drafts [R, K], or of trees of its candidates, [R, most nodes]."""
        plan = step.plan
        confidence = confidence[plan.drafted, : plan.width]
        finite = np.cumprod(confidence >= 0.0, axis=1)  # [D, w]
        usable = np.zeros_like(step.limits)
        usable[plan.drafted] = np.minimum(step.limits[plan.drafted], finite.sum(axis=1))
        if self.trees is not None:
            self.trees.take_candidates(step)
        self.lengths.choose(step, usable, confidence * finite)
        return drafts if self.trees is None else self.trees.keep(step, drafts)

    def cut(self, drafts: DraftTokenIds) -> DraftTokenIds:
        """Drafts as vLLM hands them over, cut to what was planned."""
        cut = [
            tokens[: self._handed_over[name]]
            for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
        ]
        return DraftTokenIds(drafts.req_ids, cut)

    def end_step(self) -> None:
        """The runner is done with a step, or had none."""
        step, self.step = self.step, None
        if step is not None:
            self.lengths.end(step)
