"""The stages of drafting, in the order in which an error spreads, and the worst error of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.tools.parity.stage_errors import count_non_finite, relative_error

CONTEXT_ROWS, CONTEXT_Z = "context rows", "context Z"
BLOCK_ROWS, EMBEDDING = "block rows", "embedding"
FINAL_NORM, LOGITS, DRAFTS = "final norm", "logits", "drafts"
ACCEPTANCE, TEXT = "acceptance", "text"


def tap_stage(layer: int) -> str:
    """The tap on the output of a target layer, from 0."""
    return f"tap of layer {layer}"


def layer_stage(number: int) -> str:
    """A layer of the drafter, from 0."""
    return f"layer {number}"


def stage_names(spec: DrafterSpec) -> list[str]:
    """All stages of a drafter, in order."""
    return [
        *map(tap_stage, spec.taps),
        CONTEXT_ROWS,
        CONTEXT_Z,
        BLOCK_ROWS,
        EMBEDDING,
        *map(layer_stage, range(spec.num_layers)),
        FINAL_NORM,
        LOGITS,
        DRAFTS,
        ACCEPTANCE,
        TEXT,
    ]


@dataclass(frozen=True)
class Place:
    """A prompt and one of its draft steps, both from 0."""

    prompt: int
    step: int

    def __str__(self) -> str:
        return f"prompt {self.prompt + 1}, step {self.step + 1}"


@dataclass(frozen=True)
class Stage:
    """The worst that was seen of a stage."""

    name: str
    end_to_end: float = 0.0
    """Error of the engine's value, all of the reference's own making."""
    alone: float = 0.0
    """Error of the engine's value where the reference starts from the engine's inputs."""
    place: Place | None = None
    """Where the stage alone is worst."""
    non_finite: int = 0
    """NaN and infinite numbers among the engine's values."""

    @property
    def worst(self) -> float:
        """The larger of its errors."""
        return max(self.end_to_end, self.alone)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: an error that is not finite is null."""
        place = self.place
        return {
            "stage": self.name,
            "end_to_end": _finite(self.end_to_end),
            "alone": _finite(self.alone),
            "prompt": None if place is None else place.prompt,
            "step": None if place is None else place.step,
            "non_finite": self.non_finite,
        }


class StageErrors:
    """Collects errors over all steps of all prompts."""

    def __init__(self, spec: DrafterSpec) -> None:
        self._stages = {name: Stage(name) for name in stage_names(spec)}

    def observe(
        self,
        name: str,
        place: Place,
        alone: float,
        end_to_end: float | None = None,
        non_finite: int = 0,
    ) -> None:
        """Take the errors of one step; a stage that reads no engine's input has but one."""
        before = self._stages[name]
        is_worse = before.place is None or alone > before.alone
        self._stages[name] = Stage(
            name,
            max(before.end_to_end, alone if end_to_end is None else end_to_end),
            max(before.alone, alone),
            place if is_worse else before.place,
            before.non_finite + non_finite,
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
        errors = relative_error(got, alone), relative_error(got, expected)
        self.observe(name, place, *errors, non_finite=count_non_finite(got))

    def stages(self) -> tuple[Stage, ...]:
        """All of them, in order."""
        return tuple(self._stages.values())


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None
