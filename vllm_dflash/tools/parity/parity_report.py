"""What a comparison came to, as a typed result, as JSON and as tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm_dflash.tools.parity.stages import ACCEPTANCE, BLOCK_ROWS, CONTEXT_ROWS, DRAFTS, Stage

if TYPE_CHECKING:
    from rich.console import RenderableType

    from vllm_dflash.tools.parity.recompute import Acceptance

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

    def rich(self) -> RenderableType:
        """For a terminal."""
        import rich.console
        from rich.markup import escape

        return rich.console.Group(
            f"{escape(self.drafter)} for {escape(self.target)}: runner {self.runner},"
            f" {self.dtype}, tolerance {self.tolerance:g}",
            self._stages(),
            self._acceptance(),
            self._verdict(),
        )

    def _stages(self) -> RenderableType:
        import rich.table

        table = rich.table.Table("stage")
        table.add_column("end to end", justify="right")
        table.add_column("alone", justify="right")
        table.add_column("")
        for stage in self.stages:
            note = ""
            if stage.name == self.culprit:
                note = f"[bold red]<- first difference; worst at {stage.place}[/bold red]"
            elif stage.non_finite:
                note = f"{stage.non_finite} NaN or infinite"
            elif not is_within(stage, self.tolerance):
                own = differs_alone(stage, self.tolerance)
                note = f"differs, at {stage.place}" if own else "passed on from above"
            errors = [_written(stage, error) for error in (stage.end_to_end, stage.alone)]
            table.add_row(stage.name, *errors, note)
        return table

    def _acceptance(self) -> RenderableType:
        import rich.table

        table = rich.table.Table("prompt", "", "accepted drafts, step by step")
        table.add_column("acceptance length", justify="right")
        for number, one in enumerate(self.acceptance, start=1):
            for name, accepted in (("engine", one.engine), ("reference", one.reference)):
                steps = " ".join(map(str, accepted))
                mean = f"{1 + sum(accepted) / len(accepted):.2f}" if accepted else "-"
                table.add_row(str(number) if name == "engine" else "", name, steps, mean)
        return table

    def _verdict(self) -> str:
        lines = [
            f"NaN or infinite numbers: {self.non_finite}; drafts lost to them: {self.nan_drafts}"
        ]
        if any(one.engine != one.reference for one in self.acceptance) and self.is_equal:
            lines.append(
                "Acceptance differs only where two tokens are as likely, within tolerance."
            )
        if self.is_equal:
            lines.append("[bold green]Equal[/bold green]: the engine drafts as the reference does.")
        else:
            where = f" from [bold]{self.culprit}[/bold] on" if self.culprit else ""
            lines.append(f"[bold red]Differs[/bold red]{where}: {self.cause}.")
        return "\n".join(lines)


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
