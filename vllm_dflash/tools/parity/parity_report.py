"""What a comparison came to, as a typed result, as JSON and as tables."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from vllm_dflash.tools.parity.stages import COUNTED, NOT_FINITE, Stage
from vllm_dflash.tools.tables import Table

SCHEMA = "vllm-dflash.parity/2"
ACCUMULATED = (
    "each stage alone is within the tolerance, and their errors add up to more than it from one"
    " end to the other: rounding, which a wider --tolerance allows for"
)
LOST = "drafts were thrown away because their logits were not finite"


@dataclass(frozen=True)
class Acceptance:
    """Accepted drafts of each verified step of a prompt."""

    engine: list[int]
    reference: list[int]
    """Of the reference's drafts, at the same places in the same text."""


@dataclass(frozen=True)
class ParityReport:
    """Whether an engine's drafter is the reference's, and if not, where it first differs."""

    drafter: str
    target: str
    runner: str
    """Of vLLM: `v1` or `v2`."""
    dtype: str
    tolerance: float
    """Largest relative error that counts as equal."""
    stages: tuple[Stage, ...]
    acceptance: tuple[Acceptance, ...]
    """Of each prompt."""
    nan_drafts: int
    """Drafts the engine threw away because their logits were not finite."""

    @property
    def first_difference(self) -> Stage | None:
        """The first stage that differs by itself; what comes behind may only inherit it."""
        return next((one for one in self.stages if one.differs_alone(self.tolerance)), None)

    @property
    def is_equal(self) -> bool:
        """Whether every stage is within the tolerance, alone and end to end."""
        return self.cause is None

    @property
    def culprit(self) -> str | None:
        """Name of the first stage whose own error is beyond the tolerance."""
        return None if self.first_difference is None else self.first_difference.name

    @property
    def cause(self) -> str | None:
        """What may be the matter; None if nothing is."""
        if self.first_difference is not None:
            return self.first_difference.hint
        if any(math.isinf(stage.end_to_end) for stage in self.stages):
            return NOT_FINITE
        if any(stage.differs(self.tolerance) for stage in self.stages):
            return ACCUMULATED
        return LOST if self.nan_drafts else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema": SCHEMA,
            "verdict": "equal" if self.is_equal else "differs",
            "culprit": self.culprit,
            "cause": self.cause,
            **asdict(self),
            "stages": [stage.to_dict() for stage in self.stages],
        }


def make_tables(report: ParityReport) -> list[Table]:
    """Every stage's errors, and the accepted drafts of each prompt."""
    title = (
        f"{report.drafter} for {report.target}: runner {report.runner}, {report.dtype},"
        f" tolerance {report.tolerance:g}"
    )
    stages = [
        [
            stage.name,
            _written(stage, stage.end_to_end),
            _written(stage, stage.alone),
            _note(report, stage),
        ]
        for stage in report.stages
    ]
    culprits = [n for n, stage in enumerate(report.stages) if stage.name == report.culprit]
    accepted = []
    for number, one in enumerate(report.acceptance, start=1):
        for name, counts in asdict(one).items():
            mean = f"{1 + sum(counts) / len(counts):.2f}" if counts else "-"
            prompt = str(number) if name == "engine" else ""
            accepted.append([prompt, name, " ".join(map(str, counts)), mean])
    heads = ["prompt", "", "accepted", "acceptance length"]
    return [
        Table(title, ["stage", "end to end", "alone", ""], stages, words=(0, 3), marked=culprits),
        Table("Accepted drafts, step by step", heads, accepted, words=(0, 1, 2)),
    ]


def make_notes(report: ParityReport) -> list[str]:
    """What the tables do not say, and the verdict."""
    notes = [f"Drafts lost to NaN or infinite numbers: {report.nan_drafts}"]
    if not report.is_equal:
        where = f" from {report.culprit} on" if report.culprit else ""
        return [*notes, f"Differs{where}: {report.cause}."]
    if any(one.engine != one.reference for one in report.acceptance):
        notes.append("Acceptance differs only where two tokens are as likely, within tolerance.")
    return [*notes, "Equal: the engine drafts as the reference does."]


def _written(stage: Stage, error: float) -> str:
    if stage.name in COUNTED:
        return f"{error:.0%}" if error in (0, 1) else f"{error:.2%}"
    return f"{error:.1e}"


def _note(report: ParityReport, stage: Stage) -> str:
    if stage is report.first_difference:
        return f"<- first difference; worst at {stage.place}"
    if stage.differs_alone(report.tolerance):
        return f"differs, at {stage.place}"
    return "passed on from above" if stage.differs(report.tolerance) else ""
