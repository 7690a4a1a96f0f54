"""What an engine has learned, kept for the next one: written as plain numbers, and read back.

Reading trusts nothing: compiled functions use these numbers in every step, where one that makes no
sense would stop the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dflash.planning import Floats
from vllm_dflash.planning.chances import CONFIDENCE_KNOTS
from vllm_dflash.planning.costs import COSTS, StepCosts, num_octaves
from vllm_dflash.planning.curves import MOST_POINTS, Curve

LARGEST = 1e15
"""Larger than any sensible number."""


class EstimatesError(ValueError):
    """These are not estimates, or they are those of another kind of engine."""


@dataclass(frozen=True, eq=False)
class Estimates:
    """Costs and acceptance, for either planner."""

    costs: StepCosts
    blocks: Floats
    """Drafts of blocks that were seen, and accepted, by position and confidence, [2, K, knots]; see
    `Chances`."""
    bias: Floats
    """Tokens expected and accepted lately, [2]; see `Chances`."""
    texts: Floats
    """The same as `blocks`, for what texts predict, [2, F, knots]."""

    def to_dict(self) -> dict[str, Any]:
        """Return a copy in lists and numbers; the inverse of `from_dict`."""
        tables = {name: getattr(self, name).tolist() for name in ("blocks", "bias", "texts")}
        return {"costs": _lists(self.costs.records), **tables}

    @classmethod
    def from_dict(cls, written: Any, max_draft: int, max_requests: int) -> Estimates:
        """Check and read what was written, for `max_draft` drafts (K) and `max_requests` a batch.

        Raises:
            EstimatesError: something in it is wrong.
        """
        knots = len(CONFIDENCE_KNOTS)
        try:
            found = cls(
                _costs(written["costs"], max_requests),
                _numbers(written["blocks"], (2, max_draft, knots)),
                _numbers(written["bias"], (2,)),
                _numbers(written["texts"], (2, len(written["texts"][0]), knots)),
            )
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise EstimatesError(f"{type(error).__name__}: {error}") from None
        _check("bias", found.bias >= 0)
        for name in ("blocks", "texts"):
            seen, accepted = getattr(found, name)
            _check(name, (accepted >= 0) & (accepted <= seen))
        return found


def _lists(array: npt.NDArray[Any]) -> Any:
    names = array.dtype.names
    return array.tolist() if names is None else {name: _lists(array[name]) for name in names}


def _numbers(written: Any, shape: tuple[int, ...]) -> Floats:
    numbers = np.asarray(written, dtype=np.float64)
    if not numbers.size:  # empty lists do not tell their shape
        numbers = numbers.reshape(shape)
    if numbers.shape != shape or not (np.abs(numbers) < LARGEST).all():  # NaN fails too
        raise ValueError(f"not {shape} numbers of a sensible size")
    return numbers


def _fill(array: npt.NDArray[Any], written: Any) -> None:
    if array.dtype.names is None:
        array[...] = _numbers(written, array.shape)
        return
    for name in array.dtype.names:
        _fill(array[name], written[name])


def _check(name: str, holds: Any) -> None:
    if not np.all(holds):
        raise EstimatesError(f"{name} has values that cannot be")


def _costs(written: Any, max_requests: int) -> StepCosts:
    records = np.zeros(1, COSTS)
    _fill(records, written)
    for name in ("verify", "draft", "context"):
        curve = Curve(records[name])
        _check(
            name, (records[name]["num_points"] >= 2) & (records[name]["num_points"] <= MOST_POINTS)
        )
        _check(name, (curve.counts[0] >= 0) & (np.diff(curve.counts) > 0))
        _check(name, (curve.seconds[0] >= 0) & (np.diff(curve.seconds) >= 0))
    _check("verify", Curve(records["verify"]).seconds[0] > 0)
    for name in ("plain_level", "verify_level"):
        level = records[name]
        _check(name, level["num_points"] == num_octaves(max_requests))
        _check(name, level["seen"] >= 0)
    _check("attention", records["attention"] >= 0)
    _check("prompts", (records["prompt_share"] >= 0) & (records["prompt_share"] <= 1))
    _check("prompts", records["prompt_rows"] >= 0)
    return StepCosts(records)
