"""The stages of drafting, in the order in which an error spreads, and the worst error of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from vllm_dflash.checkpoint.spec import DrafterSpec

CONTEXT_ROWS, CONTEXT_Z = "context rows", "context Z"
BLOCK_ROWS, EMBEDDING = "block rows", "embedding"
FINAL_NORM, LOGITS, DRAFTS = "final norm", "logits", "drafts"
ACCEPTANCE, TEXT = "acceptance", "text"
COUNTED = (CONTEXT_ROWS, BLOCK_ROWS, ACCEPTANCE)
"""Stages whose error is a share of rows or steps that are wrong."""
EXACT_ALONE = (*COUNTED, DRAFTS)
"""Stages that round nothing: by themselves they are right in every row or wrong."""
HINTS = {
    CONTEXT_ROWS: "the engine drafted without some of its context: rows were dropped as rejected,"
    " or stored nowhere, or not yet stored",
    CONTEXT_Z: "fc or hidden_norm: weights, the order in which taps are concatenated, epsilon",
    BLOCK_ROWS: "the bonus token, the mask token's id, or the block's positions",
    EMBEDDING: "the target's embedding or its scale, or a mask_embedding.pt that is not used",
    FINAL_NORM: "the final norm's weights or epsilon",
    LOGITS: "the head: its weights, a logit scale or softcap, or rows other than the masks'",
    DRAFTS: "the map from the drafter's vocabulary to the target's (d2t), or DFlash 2's walk along"
    " its candidates: codes, or which token a place's candidates are scored behind",
    ACCEPTANCE: "drafts are right, but others were verified: they are lost or shifted on their way"
    " to the target",
    TEXT: "the target itself, or the verification of drafts, writes other tokens than plain"
    " decoding: not the drafter's doing",
}
TAP_HINT = (
    "taps off by one (they count layers from 0 and mean their outputs; vLLM's own numbers are one"
    " higher), taken behind a norm, or a target that computes something else"
)
LAYER_HINT = (
    "rope layout, theta or scaling, q and k norms, windows or causality, positions, or weights; if"
    " no other layer differs, what is particular to this one"
)
NOT_FINITE = (
    "NaN or infinite numbers: cache that was never written, weights that were not loaded, or an"
    " overflow"
)


def tap_stage(layer: int) -> str:
    """The tap on the output of a target layer, from 0."""
    return f"tap of layer {layer}"


def layer_stage(number: int) -> str:
    """A layer of the drafter, from 0."""
    return f"layer {number}"


def stage_names(spec: DrafterSpec) -> list[str]:
    """All stages of a drafter, in order."""
    taps, layers = map(tap_stage, spec.taps), map(layer_stage, range(spec.num_layers))
    before, after = [CONTEXT_ROWS, CONTEXT_Z, BLOCK_ROWS, EMBEDDING], [FINAL_NORM, LOGITS, DRAFTS]
    return [*taps, *before, *layers, *after, ACCEPTANCE, TEXT]


@dataclass(frozen=True)
class Place:
    """A prompt and one of its draft steps, both from 0."""

    prompt: int
    step: int

    def __str__(self) -> str:
        return f"prompt {self.prompt + 1}, step {self.step + 1}"


@dataclass(frozen=True)
class Stage:
    """The worst that was seen of a stage; an error is infinite where a number is not finite."""

    name: str
    end_to_end: float = 0.0
    """Error of the engine's value, all of the reference's own making."""
    alone: float = 0.0
    """Error of the engine's value where the reference starts from the engine's inputs."""
    place: Place | None = None
    """Where the stage alone is worst."""

    @property
    def worst(self) -> float:
        """The larger of its errors."""
        return max(self.end_to_end, self.alone)

    @property
    def hint(self) -> str:
        """What to look at if it is the first that differs."""
        if math.isinf(self.alone):
            return NOT_FINITE
        is_tap = self.name.startswith(tap_stage(0)[:-1])
        return HINTS.get(self.name) or (TAP_HINT if is_tap else LAYER_HINT)

    def differs_alone(self, tolerance: float) -> bool:
        """Whether it is wrong by itself, and not only for what came before it."""
        return self.alone > (0.0 if self.name in EXACT_ALONE else tolerance)

    def differs(self, tolerance: float) -> bool:
        """Whether it is wrong, by itself or end to end."""
        return self.end_to_end > tolerance or self.differs_alone(tolerance)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: an error that is not finite is null."""
        errors = {"end_to_end": self.end_to_end, "alone": self.alone}
        return {
            "stage": self.name,
            **{name: error if math.isfinite(error) else None for name, error in errors.items()},
            "prompt": self.place and self.place.prompt,
            "step": self.place and self.place.step,
        }


class StageErrors:
    """Collects errors over all steps of all prompts."""

    def __init__(self, spec: DrafterSpec) -> None:
        self._stages = {name: Stage(name) for name in stage_names(spec)}

    def observe(
        self, name: str, place: Place, alone: float, end_to_end: float | None = None
    ) -> None:
        """Take the errors of one step; a stage that reads no engine's input has but one."""
        before = self._stages[name]
        is_worse = before.place is None or alone > before.alone
        self._stages[name] = Stage(
            name,
            max(before.end_to_end, alone if end_to_end is None else end_to_end),
            max(before.alone, alone),
            place if is_worse else before.place,
        )

    def compare(
        self,
        name: str,
        place: Place,
        got: torch.Tensor,
        alone: torch.Tensor,
        expected: torch.Tensor,
    ) -> None:
        """Take the engine's values of one step.

        Args:
            name: of the stage.
            place: where in the text.
            got: the engine's.
            alone: the reference's from the engine's inputs, of the same shape.
            expected: the reference's from its own.
        """
        self.observe(name, place, relative_error(got, alone), relative_error(got, expected))

    def stages(self) -> tuple[Stage, ...]:
        """All of them, in order."""
        return tuple(self._stages.values())


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference in a row, relative to the row's largest number; of the worst row.

    Row by row, since targets have rows (the first token's) a thousand times as large as others,
    beside which an error of another row would vanish. Infinite where a number is not finite.

    Args:
        got: [..., N].
        expected: of the same shape.
    """
    if got.shape != expected.shape:
        raise ValueError(f"shapes differ: {list(got.shape)} and {list(expected.shape)}")
    difference = (got.float() - expected.float()).abs().amax(-1)
    least = torch.finfo(torch.float32).tiny
    errors = difference / expected.float().abs().amax(-1).clamp(min=least)
    # A row that ought to be zeros is far off, and yet of numbers.
    errors = torch.where(difference.isfinite(), errors.clamp(max=1 / least), errors)
    return _worst(errors)


def gap_to_best(logits: torch.Tensor, columns: torch.Tensor) -> float:
    """How far logits of the chosen columns lie below the best, relative to the row's largest.

    0 where each choice is the most likely one, or as likely; of the worst row.

    Args:
        logits: [K, V].
        columns: a choice for each row, [K].
    """
    logits = logits.float()
    chosen = logits.gather(-1, columns.long()[:, None])[:, 0]
    return _worst((logits.amax(-1) - chosen) / logits.abs().amax(-1))


def share_of(wrong: torch.Tensor) -> float:
    """Share of a boolean tensor that is true; 0 of none."""
    return float(wrong.float().mean()) if wrong.numel() else 0.0


def _worst(errors: torch.Tensor) -> float:
    worst = errors.max().item() if errors.numel() else 0.0
    return worst if math.isfinite(worst) else math.inf
