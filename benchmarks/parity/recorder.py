"""Records, in its worker, what an engine computes while it drafts for one request.

Works on eager models only: compiled blocks and captured graphs call no hooks. Shapes: Q rows of a
block (the bonus token and mask tokens), of which K predict, H hidden size, m taps, T stored context
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from vllm_dflash.planning.step import StepRecord

NOT_VERIFIED = -1
NOTHING = torch.empty(0)
"""Value of a step's fields before its block has run."""


@dataclass
class DraftStep:
    """One block forward of the engine's drafter."""

    rows_taken: int
    """Context rows that the engine had stored when this block ran."""
    input_ids: torch.Tensor
    """[Q]."""
    positions: torch.Tensor
    """[Q]."""
    embedding: torch.Tensor = NOTHING
    """[Q, H]."""
    layers: list[torch.Tensor] = field(default_factory=list)
    """Output of each layer, including its residual, [Q, H]."""
    hidden: torch.Tensor = NOTHING
    """Output of the final norm, [Q, H]."""
    logits: torch.Tensor = NOTHING
    """Logits of the rows that predict, [K, V']; for DFlash 2 those of candidates, [K, C]; for
    LiLiCorr the candidates' log-probabilities."""
    drafts: torch.Tensor = NOTHING
    """Drafted tokens, as the target's ids, [K]."""
    num_drafted: int = 0
    """Drafts that the target verified; fewer than K if the request could not use all."""
    num_accepted: int = NOT_VERIFIED
    candidates: torch.Tensor | None = None
    """Vocabulary columns of `logits` if those are of candidates, [K, C]; otherwise None."""


@dataclass
class Recording:
    """All context rows and draft steps of one request, in order."""

    token_ids: list[int]
    """The prompt and the new tokens."""
    prompt_length: int
    features: torch.Tensor
    """Taps, concatenated in ascending layer order, [T, m * H_target]."""
    z: torch.Tensor
    """The same rows fused, from which keys and values were computed, [T, H]."""
    positions: torch.Tensor
    """[T]. A position that occurs twice was stored twice; the later row counts."""
    steps: list[DraftStep]
    runner: str
    """vLLM's model runner: `v1` or `v2`."""
    nan_drafts: int = 0
    """Drafts that the engine dropped because their logits were not finite."""

    @classmethod
    def load(cls, path: Path, token_ids: list[int], prompt_length: int) -> Recording:
        """Load what `RecordedDrafting.take_recording` wrote while these tokens were generated."""
        found = torch.load(path, weights_only=True)
        steps = [DraftStep(**step) for step in found.pop("steps")]
        return cls(token_ids, prompt_length, steps=steps, **found)

    def visible_rows(self, step: DraftStep, length: int) -> torch.Tensor:
        """Return the row of each context position that this step sees, or -1, [length]."""
        positions = self.positions[: step.rows_taken].long()
        rows = (positions < length).nonzero()[:, 0]
        # The last row of a position counts.
        return torch.full((length,), -1).scatter_reduce(0, positions[rows], rows, "amax")


class RecordedDrafting:
    """Worker extension (`worker_extension_cls`) for an engine with our drafter."""

    drafter: Any
    vllm_config: Any

    def record_drafting(self) -> None:
        """Start recording all that is computed for drafts.

        Raises:
            ValueError: the engine is compiled, or takes more than one request at a time.
        """
        is_eager = self.vllm_config.model_config.enforce_eager
        if not is_eager or self.vllm_config.scheduler_config.max_num_seqs != 1:
            raise ValueError("record_drafting needs enforce_eager=True and max_num_seqs=1.")
        self._draft_recorder = DraftRecorder(self.drafter)

    def take_recording(self, path: str) -> None:
        """Stop recording, and write the recording to a file for `Recording.load`."""
        torch.save(self._draft_recorder.finish(), path)


RECORDED = f"{RecordedDrafting.__module__}.{RecordedDrafting.__qualname__}"


class DraftRecorder:
    """Records one request at a time, since rows of a batch could not be told apart."""

    def __init__(self, drafter: Any) -> None:
        """Start recording. `drafter`: our proposer (V1) or speculator (V2)."""
        model, self._drafter = drafter.model, drafter
        self._is_v2 = hasattr(drafter, "sample_draft")
        self._nan_drafts = self._count_nan_drafts()
        self._rows: list[tuple[torch.Tensor, ...]] = []
        """Features, Z and positions, one tuple each time rows were stored."""
        self._steps: list[DraftStep] = []
        self._newest: torch.Tensor | None = None
        """Features that were fused last, before they are stored, [T, m * H_target]."""
        self._verified: DraftStep | None = None
        """On V2, the block that the running step verifies: when its result is known, the next
        block has been drafted."""
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
            self._wrap(drafter, "_grade", self._on_grading)
            self._wrap(drafter, "sample_draft", lambda drafts, *_: self._keep(drafts=drafts))
        else:
            self._wrap(drafter.block, "pick", lambda picked, *_: self._keep(drafts=picked[0]))
            self._wrap(drafter.statistics, "record_outcomes", self._on_verification)
        self._undo.enter_context(model.register_forward_pre_hook(self._on_model, with_kwargs=True))
        for layer in model.block.layers:
            self._undo.enter_context(layer.register_forward_hook(self._on_layer))

    def finish(self) -> dict[str, Any]:
        """Stop recording. Returns the fields of `Recording`."""
        self._undo.close()
        if self._is_v2 and self._steps and self._steps[-1] is not self._verified:
            del self._steps[-1]  # drafted after the last step, and never verified
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
            "nan_drafts": self._count_nan_drafts() - self._nan_drafts,
        }

    def _count_nan_drafts(self) -> int:
        if self._is_v2:  # the device counts
            self._drafter.read_counts()
        return int(self._drafter.statistics.nan_drafts)

    def _wrap(self, owner: Any, name: str, observe: Callable[..., None]) -> None:
        """Call `observe(result, *arguments)` after a method of an object."""
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # Copy first: the call may overwrite its arguments.
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
        stored = _copy(slots[0]) >= 0  # rejected rows have slot -1
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
        x, residual = output  # vLLM adds them in the next norm
        self._steps[-1].layers.append(_copy(x + residual))

    def _keep(self, **values: torch.Tensor | list[int]) -> None:
        """Set fields of the newest step."""
        for name, value in values.items():
            setattr(self._steps[-1], name, _copy(torch.as_tensor(value)))

    # --- verification -------------------------------------------------------------------------

    def _on_grading(self, _: None, slots: object, num_sampled: torch.Tensor, *__: Any) -> None:
        from vllm_dflash.engine.v2.exchange import verified_drafts

        self._verified = self._steps[-1] if self._steps else None
        if self._verified is not None:
            (verified,) = verified_drafts(_copy(self._drafter.outcomes[:1]).numpy())
            _set_accepted(self._verified, num_sampled.tolist(), verified)

    def _on_verification(self, _: None, step: StepRecord) -> None:
        _set_accepted(self._steps[-1], step.produced.tolist(), int(step.verified[0]))


def _set_accepted(block: DraftStep, produced: Sequence[int], verified: int) -> None:
    """Record how many drafts of the request were verified and accepted."""
    if verified:
        block.num_drafted, block.num_accepted = verified, max(produced[0] - 1, 0)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
