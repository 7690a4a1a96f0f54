"""Step costs of another machine, from a JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, PositiveFloat, ValidationError

from vllm_dflash.checkpoint.refusal import one_line
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.curves import Curve


def _ascending(points: dict[int, float]) -> dict[int, float]:
    points = dict(sorted(points.items()))
    if len(points) < 2 or sorted(points.values()) != [*points.values()]:
        raise ValueError("two points at least, and more rows never take less time")
    return points


Milliseconds = Annotated[dict[int, PositiveFloat], AfterValidator(_ascending)]


class CostTable(BaseModel):
    """Milliseconds by rows."""

    model_config = ConfigDict(extra="forbid")

    name: str
    """Name of the machine and the models."""
    source: str
    """How it was measured and by whom, or that it is assumed."""
    verify_ms: Milliseconds
    """Milliseconds of the target's step."""
    draft_ms: Milliseconds
    """Milliseconds of the drafter's blocks."""
    context_ms: Milliseconds
    """Milliseconds of storing context."""

    @classmethod
    def read(cls, file: Path) -> CostTable:
        """Read a table; raise ValueError if the file is not one."""
        try:
            return cls.model_validate_json(file.read_text())
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}.") from None
        except ValidationError as error:
            raise ValueError(f"{file}: {one_line(error)}.") from None

    def curves(self) -> tuple[Curve, Curve, Curve]:
        """Return the curves of verify, draft and context: seconds against rows."""
        verify, draft, context = (
            Curve.of(np.array([*points]), np.array([*points.values()]) / 1000)
            for points in (self.verify_ms, self.draft_ms, self.context_ms)
        )
        return verify, draft, context

    def costs(self, max_requests: int) -> StepCosts:
        """Return the costs that a planner starts from."""
        return StepCosts.of(*self.curves(), max_requests)
