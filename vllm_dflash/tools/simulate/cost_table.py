"""What steps cost on a machine that is not here, from a JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from vllm_dflash.checkpoint.refusal import without_frame
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.curves import Curve

Milliseconds = dict[int, Annotated[float, Field(gt=0)]]


class CostTable(BaseModel):
    """Milliseconds by rows, each ascending and of two points at least."""

    model_config = ConfigDict(extra="forbid")

    name: str
    """Of the machine and the models."""
    source: str
    """Who measured it and how, or that it is assumed."""
    verify_ms: Milliseconds
    """Of the target's step."""
    draft_ms: Milliseconds
    """Of the drafter's blocks."""
    context_ms: Milliseconds
    """Of storing context."""

    @field_validator("verify_ms", "draft_ms", "context_ms")
    @classmethod
    def _is_a_curve(cls, points: Milliseconds) -> Milliseconds:
        if len(points) < 2 or sorted(points.values()) != [points[rows] for rows in sorted(points)]:
            raise ValueError("two points at least, and more rows never take less time")
        return dict(sorted(points.items()))

    @classmethod
    def read(cls, file: Path) -> CostTable:
        """Raises ValueError where a file is none."""
        try:
            return cls.model_validate_json(file.read_text())
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}.") from None
        except ValidationError as error:
            raise ValueError(f"{file}: {without_frame(error)}.") from None

    def curves(self) -> tuple[Curve, Curve, Curve]:
        """Verify, draft, context: seconds against rows."""
        return (
            _curve(self.verify_ms),
            _curve(self.draft_ms),
            _curve(self.context_ms),
        )

    def costs(self, max_requests: int) -> StepCosts:
        """What a planner starts from."""
        return StepCosts(*self.curves(), max_requests)


def _curve(points: Milliseconds) -> Curve:
    return Curve(np.array([*points]), np.array([*points.values()]) / 1000)
