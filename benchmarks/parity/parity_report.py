"""The result of a comparison: errors per stage and the verdict, as JSON and tables.

Imports nothing heavy, since the command line imports it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.tools.tables import Table

SCHEMA = "vllm-dflash.parity/2"
TOKENS, MAX_MODEL_LEN = 32, 2048
"""Defaults: new tokens per prompt, and the engine's `max_model_len`."""
BUILT_IN = Path(__file__).with_name("prompts.jsonl")
"""Short and longer prompts, whose context takes several cache blocks."""
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest relative error that counts as equal, by dtype."""
HINTS = {
    "tap": "taps off by one (they count layers from 0 and mean their outputs; vLLM's own numbers"
    " are one higher), taken after a norm, or a target that computes something else",
    "context rows": "the engine drafted without some of its context: rows were dropped as rejected,"
    " or not stored, or stored too late",
    "context Z": "fc or hidden_norm: weights, the order in which taps are concatenated, epsilon",
    "block rows": "the bonus token, the mask token's id, or the block's positions",
    "embedding": "the target's embedding or its scale, or a mask_embedding.pt that is not used",
    "layer": "rope layout, theta or scaling, q and k norms, windows or causality, positions, or"
    " weights; if no other layer differs, something that only this one has",
    "final norm": "the final norm's weights or epsilon",
    "logits": "the head: its weights, a logit scale or softcap, or rows other than the masks'",
    "drafts": "the map from the drafter's vocabulary to the target's (d2t), or the selection among"
    " candidates: with DFlash 2 codes, or the token after which candidates are scored; with"
    " LiLiCorr the head, or the context row that it reads",
    "acceptance": "drafts are right, but others were verified: they are lost or shifted on their"
    " way to the target",
    "text": "the target itself, or the verification of drafts, writes other tokens than plain"
    " decoding: the drafter is not the cause",
}
"""Stages of drafting, in the order in which errors spread, and what to check if a stage is the
first that differs. "tap" and "layer" stand for one stage per tap and per layer of the drafter."""
COUNTED = ("context rows", "block rows", "acceptance")
"""Stages whose error is the share of wrong rows or steps."""
EXACT_ALONE = (*COUNTED, "drafts")
"""Stages without rounding, whose own error must be 0."""
NOT_FINITE = (
    "NaN or infinite numbers: cache that was never written, weights that were not loaded, or an"
    " overflow"
)
ACCUMULATED = (
    "each stage alone is within the tolerance, but their errors add up to more: rounding, which a"
    " larger --tolerance accepts"
)
LOST = "drafts were dropped because their logits were not finite"


def stage_names(spec: DrafterSpec) -> list[str]:
    """Return the names of all stages of a drafter, in order."""
    several = {
        "tap": [f"tap of layer {tap}" for tap in spec.taps],
        "layer": [f"layer {number}" for number in range(spec.num_layers)],
    }
    return [name for kind in HINTS for name in several.get(kind, [kind])]


@dataclass
class Stage:
    """The largest errors of a stage so far; infinite if a number was not finite."""

    name: str
    end_to_end: float = 0.0
    """Error relative to the reference's value from its own inputs."""
    alone: float = 0.0
    """Error relative to the reference's value from the engine's inputs."""
    prompt: int | None = None
    step: int | None = None
    """Prompt and step with the largest error alone, both from 0."""

    def observe(
        self, prompt: int, step: int, alone: float, end_to_end: float | None = None
    ) -> None:
        """Add the errors of one step. A stage without inputs from the engine has only `alone`."""
        if self.prompt is None or alone > self.alone:
            self.prompt, self.step = prompt, step
        self.alone = max(self.alone, alone)
        self.end_to_end = max(self.end_to_end, alone if end_to_end is None else end_to_end)

    @property
    def hint(self) -> str:
        """What to check if this is the first stage that differs."""
        if math.isinf(self.alone):
            return NOT_FINITE
        return next(hint for kind, hint in HINTS.items() if self.name.startswith(kind))

    def differs_alone(self, tolerance: float) -> bool:
        """Whether the stage itself is wrong, apart from the errors of earlier stages."""
        return self.alone > (0.0 if self.name in EXACT_ALONE else tolerance)

    def differs(self, tolerance: float) -> bool:
        """Whether the stage is wrong, alone or end to end."""
        return self.end_to_end > tolerance or self.differs_alone(tolerance)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; an infinite error becomes None."""
        errors = {"end_to_end": self.end_to_end, "alone": self.alone}
        return {
            "stage": self.name,
            **{name: error if math.isfinite(error) else None for name, error in errors.items()},
            "prompt": self.prompt,
            "step": self.step,
        }


@dataclass(frozen=True)
class Acceptance:
    """Number of accepted drafts in each verified step of a prompt."""

    engine: list[int]
    reference: list[int]
    """The same for the reference's drafts, at the same positions of the same text."""


@dataclass(frozen=True)
class ParityReport:
    """Whether an engine's drafter matches the reference, and otherwise where it first differs."""

    drafter: str
    target: str
    runner: str
    """vLLM's model runner: `v1` or `v2`."""
    dtype: str
    tolerance: float
    """Largest relative error that counts as equal."""
    stages: tuple[Stage, ...]
    acceptance: tuple[Acceptance, ...]
    """One per prompt."""
    nan_drafts: int
    """Drafts that the engine dropped because their logits were not finite."""

    @property
    def first_difference(self) -> Stage | None:
        """The first stage that differs by itself; later ones may only inherit its error."""
        return next((one for one in self.stages if one.differs_alone(self.tolerance)), None)

    @property
    def is_equal(self) -> bool:
        """Whether every stage is within the tolerance, alone and end to end."""
        return self.cause is None

    @property
    def culprit(self) -> str | None:
        """Name of the first stage whose own error exceeds the tolerance."""
        return None if self.first_difference is None else self.first_difference.name

    @property
    def cause(self) -> str | None:
        """The likely cause of a difference; None if everything is equal."""
        if self.first_difference is not None:
            return self.first_difference.hint
        if any(math.isinf(stage.end_to_end) for stage in self.stages):
            return NOT_FINITE
        if any(stage.differs(self.tolerance) for stage in self.stages):
            return ACCUMULATED
        return LOST if self.nan_drafts else None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "schema": SCHEMA,
            "verdict": "equal" if self.is_equal else "differs",
            "culprit": self.culprit,
            "cause": self.cause,
            **asdict(self),
            "stages": [stage.to_dict() for stage in self.stages],
        }


def make_tables(report: ParityReport) -> list[Table]:
    """Make the tables of every stage's errors, and of accepted drafts per prompt."""
    title = (
        f"{report.drafter} for {report.target}: runner {report.runner}, {report.dtype},"
        f" tolerance {report.tolerance:g}"
    )
    stages = []
    for stage in report.stages:
        errors = [_written(stage, error) for error in (stage.end_to_end, stage.alone)]
        stages.append([stage.name, *errors, _note(report, stage)])
    culprits = [n for n, stage in enumerate(report.stages) if stage is report.first_difference]
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
    """Return the lines of text after the tables; the last is the verdict."""
    notes = [f"Drafts lost to NaN or infinite numbers: {report.nan_drafts}"]
    if not report.is_equal:
        where = f" from {report.culprit} on" if report.culprit else ""
        return [*notes, f"Differs{where}: {report.cause}."]
    if any(one.engine != one.reference for one in report.acceptance):
        notes.append(
            "Acceptance differs only where two tokens are equally likely, within tolerance."
        )
    return [*notes, "Equal: the engine drafts as the reference does."]


def _written(stage: Stage, error: float) -> str:
    if stage.name in COUNTED:
        return f"{error:.0%}" if error in (0, 1) else f"{error:.2%}"
    return f"{error:.1e}"


def _note(report: ParityReport, stage: Stage) -> str:
    if stage.differs_alone(report.tolerance):
        assert stage.prompt is not None
        assert stage.step is not None
        place = f"at prompt {stage.prompt + 1}, step {stage.step + 1}"
        is_first = stage is report.first_difference
        return f"<- first difference; worst {place}" if is_first else f"differs, {place}"
    return "passed on from above" if stage.differs(report.tolerance) else ""
