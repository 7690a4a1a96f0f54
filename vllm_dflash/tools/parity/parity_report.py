"""What a comparison came to, as a typed result, as JSON and as tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm_dflash.tools.parity.stages import ACCEPTANCE, BLOCK_ROWS, CONTEXT_ROWS, DRAFTS, Stage
from vllm_dflash.tools.tables import Table

if TYPE_CHECKING:
    from vllm_dflash.tools.parity.compare_request import Acceptance

SCHEMA = "vllm-dflash.parity/1"
COUNTED = (CONTEXT_ROWS, BLOCK_ROWS, ACCEPTANCE)
"""Stages whose error is a share of rows or steps that are wrong."""
EXACT_ALONE = (*COUNTED, DRAFTS)
"""Stages that round nothing: by themselves they are right in every row or wrong."""
ACCUMULATED = (
    "each stage alone is within the tolerance, and their errors add up to more than it from one"
    " end to the other: rounding, which a wider --tolerance allows for"
)


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
    culprit: str | None
    """Name of the first stage whose own error is beyond the tolerance."""
    cause: str | None
    """A sentence on it."""

    @property
    def non_finite(self) -> int:
        """NaN and infinite numbers the engine computed on the way."""
        return sum(stage.non_finite for stage in self.stages)

    @property
    def is_equal(self) -> bool:
        """Whether every stage is within the tolerance, alone and end to end."""
        return not self.nan_drafts and all(is_within(s, self.tolerance) for s in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema": SCHEMA,
            "drafter": self.drafter,
            "target": self.target,
            "runner": self.runner,
            "dtype": self.dtype,
            "tolerance": self.tolerance,
            "verdict": "equal" if self.is_equal else "differs",
            "culprit": self.culprit,
            "cause": self.cause,
            "stages": [stage.to_dict() for stage in self.stages],
            "acceptance": [asdict(one) for one in self.acceptance],
            "nan_drafts": self.nan_drafts,
            "non_finite": self.non_finite,
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
        for name, counts in (("engine", one.engine), ("reference", one.reference)):
            mean = f"{1 + sum(counts) / len(counts):.2f}" if counts else "-"
            prompt = str(number) if name == "engine" else ""
            accepted.append([prompt, name, " ".join(map(str, counts)), mean])
    return [
        Table(title, ["stage", "end to end", "alone", ""], stages, words=(0, 3), marked=culprits),
        Table(
            "Accepted drafts, step by step",
            ["prompt", "", "accepted", "acceptance length"],
            accepted,
            words=(0, 1, 2),
        ),
    ]


def make_notes(report: ParityReport) -> list[str]:
    """What the tables do not say, and the verdict."""
    notes = [
        f"NaN or infinite numbers: {report.non_finite}; drafts lost to them: {report.nan_drafts}"
    ]
    if report.is_equal:
        if any(one.engine != one.reference for one in report.acceptance):
            notes.append(
                "Acceptance differs only where two tokens are as likely, within tolerance."
            )
        return [*notes, "Equal: the engine drafts as the reference does."]
    where = f" from {report.culprit} on" if report.culprit else ""
    return [*notes, f"Differs{where}: {report.cause}."]


def is_within(stage: Stage, tolerance: float) -> bool:
    """Whether a stage counts as equal."""
    return stage.end_to_end <= tolerance and not differs_alone(stage, tolerance)


def differs_alone(stage: Stage, tolerance: float) -> bool:
    """Whether a stage is wrong by itself, and not only for what came before it."""
    allowed = 0.0 if stage.name in EXACT_ALONE else tolerance
    return stage.alone > allowed or stage.non_finite > 0


def first_difference(stages: tuple[Stage, ...], tolerance: float) -> Stage | None:
    """The first stage that differs by itself; what comes behind may only inherit it."""
    for stage in stages:
        if differs_alone(stage, tolerance):
            return stage
    return None


def _written(stage: Stage, error: float) -> str:
    if stage.name in COUNTED:
        return f"{error:.0%}" if error in (0, 1) else f"{error:.2%}"
    return f"{error:.1e}"


def _note(report: ParityReport, stage: Stage) -> str:
    if stage.name == report.culprit:
        return f"<- first difference; worst at {stage.place}"
    if stage.non_finite:
        return f"{stage.non_finite} NaN or infinite"
    if is_within(stage, report.tolerance):
        return ""
    own = differs_alone(stage, report.tolerance)
    return f"differs, at {stage.place}" if own else "passed on from above"
