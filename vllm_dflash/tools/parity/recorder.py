"""What an engine computes while it drafts for one request: written down in its worker, and read.

Works on eager models only: a compiled block or a captured graph calls no hooks. Shapes: Q rows of a
block (the bonus token's and k masks'), H hidden size, m taps, T context rows taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

NOT_VERIFIED = -1
NOTHING = torch.empty(0)
"""What a step has before its block has run."""


@dataclass
class DraftStep:
    """One block forward of the engine's drafter."""

    rows_taken: int
    """How many context rows the engine had taken in when this block ran."""
    input_ids: torch.Tensor
    """[Q]."""
    positions: torch.Tensor
    """[Q]."""
    embedding: torch.Tensor = NOTHING
    """[Q, H]."""
    layers: list[torch.Tensor] = field(default_factory=list)
    """Output of each layer, its residual added, [Q, H]."""
    hidden: torch.Tensor = NOTHING
    """Behind the final norm, [Q, H]."""
    logits: torch.Tensor = NOTHING
    """Logits of the mask rows, [Q - 1, V']; for DFlash 2 those of candidates, [Q - 1, C], and for
    LiLiCorr their log-probabilities."""
    drafts: torch.Tensor = NOTHING
    """Tokens of the target that were drafted, [Q - 1]."""
    num_drafted: int = 0
    """Drafts the target verified; fewer than Q - 1 where the request could not use all."""
    num_accepted: int = NOT_VERIFIED
    candidates: torch.Tensor | None = None
    """Columns of the logits, where they are those of candidates, [Q - 1, C]."""


@dataclass
class Recording:
    """All context rows and draft steps of one request, in the order in which they came."""

    token_ids: list[int]
    """The prompt and the new tokens."""
    prompt_length: int
    features: torch.Tensor
    """Taps, concatenated in ascending layer order, [T, m * H_target]."""
    z: torch.Tensor
    """The same rows fused, as their keys and values were made of them, [T, H]."""
    positions: torch.Tensor
    """[T]. One that occurs twice was stored twice; the later row counts."""
    steps: list[DraftStep]
    runner: str
    """Model runner of vLLM: `v1` or `v2`."""
    nan_drafts: int = 0
    """Drafts the engine threw away because their logits were not finite."""

    @classmethod
    def load(cls, path: Path, token_ids: list[int], prompt_length: int) -> Recording:
        """What `RecordedDrafting.take_recording` wrote while these tokens were generated."""
        found = torch.load(path, weights_only=True)
        steps = [DraftStep(**step) for step in found.pop("steps")]
        return cls(token_ids, prompt_length, steps=steps, **found)

    def visible_rows(self, step: DraftStep, length: int) -> torch.Tensor:
        """Row of each context position that this step sees, -1 where there is none: [length]."""
        positions = self.positions[: step.rows_taken].long()
        rows = (positions < length).nonzero()[:, 0]
        # Of several rows of one position, the last counts.
        return torch.full((length,), -1).scatter_reduce(0, positions[rows], rows, "amax")


class RecordedDrafting:
    """Given to the worker of an engine that drafts with ours (`worker_extension_cls`)."""

    drafter: Any
    vllm_config: Any

    def record_drafting(self) -> None:
        """From now on write down all that is computed for drafts.

        Raises:
            ValueError: the engine is compiled, or takes more than one request at a time.
        """
        is_eager = self.vllm_config.model_config.enforce_eager
        if not is_eager or self.vllm_config.scheduler_config.max_num_seqs != 1:
            raise ValueError("record_drafting needs enforce_eager=True and max_num_seqs=1.")
        self._draft_recorder = DraftRecorder(self.drafter)

    def take_recording(self, path: str) -> None:
        """Stop, and write it to a file for `Recording.load`."""
        torch.save(self._draft_recorder.finish(), path)


RECORDED = f"{RecordedDrafting.__module__}.{RecordedDrafting.__qualname__}"


class DraftRecorder:
    """Records one request at a time; rows of several in one batch could not be told apart."""

    def __init__(self, drafter: Any) -> None:
        """For our proposer (V1) or speculator (V2); recording starts here."""
        model, statistics = drafter.model, drafter.statistics
        self._drafter = drafter
        self._nan_drafts = statistics.nan_drafts
        self._rows: list[tuple[torch.Tensor, ...]] = []
        """Features, Z and positions of each time that rows were stored."""
        self._steps: list[DraftStep] = []
        self._newest: torch.Tensor | None = None
        """Features that were fused and are to be stored, [T, m * H_target]."""
        self._verified: DraftStep | None = None
        """The block that the running step verifies, on V2: the next is drafted by the time that
        what became of it is known."""
        self._is_v2 = hasattr(drafter, "sample_draft")
        self._undo = ExitStack()
        self._wrap(model.context, "fuse", self._on_fuse)
        self._wrap(model.context, "store_fused", self._on_store)
        self._wrap(model.block, "forward", lambda y, x, *_: self._keep(embedding=x, hidden=y))
        self._wrap(model, "compute_logits", lambda found, *_: self._keep(logits=found))
        self._wrap(
            model,
            "compute_candidates",
            lambda found, *_: self._keep(candidates=found[0], logits=found[1]),
        )
        if self._is_v2:
            self._wrap(drafter, "observe_verification", self._on_grading)
            self._wrap(drafter, "sample_draft", lambda drafts, *_: self._keep(drafts=drafts))
        else:
            self._wrap(drafter.block, "pick", lambda picked, *_: self._keep(drafts=picked[0]))
        self._wrap(statistics, "count_verified", self._on_verification)
        self._undo.enter_context(model.register_forward_pre_hook(self._on_model, with_kwargs=True))
        for layer in model.block.layers:
            self._undo.enter_context(layer.register_forward_hook(self._on_layer))

    def finish(self) -> dict[str, Any]:
        """Stop, and return all of it, as `Recording` has it."""
        self._undo.close()
        if self._is_v2 and self._steps and self._steps[-1] is not self._verified:
            del self._steps[-1]  # drafted behind the last step, which nobody verifies
        spec = self._drafter.spec
        widths = len(spec.taps) * spec.target_hidden_size, spec.hidden_size
        nothing = (*(torch.zeros(0, width) for width in widths), torch.zeros(0, dtype=torch.int64))
        features, z, positions = map(torch.cat, zip(*self._rows or [nothing], strict=True))
        return {
            "features": features,
            "z": z,
            "positions": positions,
            "steps": [vars(step) for step in self._steps],
            "runner": "v2" if self._is_v2 else "v1",
            "nan_drafts": self._drafter.statistics.nan_drafts - self._nan_drafts,
        }

    def _wrap(self, owner: Any, name: str, observe: Callable[..., None]) -> None:
        """Call `observe(result, *arguments)` after a method of an object."""
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # Before the call: what is passed may be overwritten in it.
            kept = [_copy(value) if isinstance(value, torch.Tensor) else value for value in args]
            result = original(*args, **kwargs)
            observe(result, *kept, **kwargs)
            return result

        self._undo.enter_context(patch.object(owner, name, wrapped))

    # --- context ------------------------------------------------------------------------------

    def _on_fuse(self, _: torch.Tensor, features: torch.Tensor) -> None:
        self._newest = features

    def _on_store(
        self, _: None, z: torch.Tensor, positions: torch.Tensor, slots: list[torch.Tensor]
    ) -> None:
        assert self._newest is not None
        stored = _copy(slots[0]) >= 0  # a slot of -1 is a row that was rejected
        self._rows.append((self._newest[: len(z)][stored], z[stored], positions[stored]))

    # --- block --------------------------------------------------------------------------------

    def _on_model(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip(("input_ids", "positions"), args, strict=False)) | kwargs
        self._steps.append(
            DraftStep(
                sum(len(positions) for *_, positions in self._rows),
                input_ids=_copy(named["input_ids"]),
                positions=_copy(named["positions"]),
            )
        )

    def _on_layer(self, _: Any, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, residual = output  # vLLM adds them up in the norm that comes next
        self._steps[-1].layers.append(_copy(x + residual))

    def _keep(self, **values: torch.Tensor | list[int]) -> None:
        """Keep values of the newest block."""
        for name, value in values.items():
            setattr(self._steps[-1], name, _copy(torch.as_tensor(value)))

    # --- verification -------------------------------------------------------------------------

    def _on_grading(self, *_: Any) -> None:
        self._verified = self._steps[-1] if self._steps else None

    def _on_verification(
        self, _: None, ids: object, produced: Sequence[int], drafts: Sequence[tuple[int, int]]
    ) -> None:
        """Drafts of the one request were verified."""
        block = self._verified if self._is_v2 else self._steps[-1]
        verified, _free = drafts[0]
        if verified and block is not None:
            block.num_drafted, block.num_accepted = verified, max(produced[0] - 1, 0)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
