"""What the gate found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

SCHEMA = "vllm-dflash.verify/1"
Verdict = Literal["lossless", "regression", "nothing drafted"]
EXIT_CODES: Mapping[Verdict, int] = {"lossless": 0, "regression": 1, "nothing drafted": 2}


@dataclass(frozen=True)
class Finding:
    """A divergence, with the place and the words."""

    prompt: int
    """From 0."""
    position: int
    """Tokens of the text before it."""
    dflash: str | None
    plain: str | None
    """What each wrote there; None: its text has ended."""
    regret: float
    """Of DFlash's token, in nat; infinite where one of the texts has ended."""
    is_tie: bool

    def __str__(self) -> str:
        def word(token: str | None) -> str:
            return "the end" if token is None else repr(token)

        regret = f"{self.regret:.3g} nat" if math.isfinite(self.regret) else "no tie"
        return (
            f"{regret} at prompt {self.prompt}, position {self.position}: DFlash wrote"
            f" {word(self.dflash)}, plain decoding {word(self.plain)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values; a regret that is not finite is None."""
        return asdict(self) | {"regret": self.regret if math.isfinite(self.regret) else None}


@dataclass(frozen=True)
class Level:
    """All texts, written so many at a time."""

    concurrency: int
    drafts_verified: int
    """Drafts the target verified meanwhile, as vLLM counts them."""
    acceptance_length: float | None
    """Tokens of a verify step of a request, bonus token included; None: there were no such."""
    texts: tuple[tuple[Finding, ...], ...]
    """The divergences of each text."""

    @property
    def identical(self) -> int:
        """Texts without any divergence."""
        return sum(not text for text in self.texts)

    @property
    def with_regressions(self) -> int:
        """Texts with at least one."""
        return sum(any(not one.is_tie for one in text) for text in self.texts)

    @property
    def with_ties(self) -> int:
        """Texts that diverge in ties only."""
        return len(self.texts) - self.identical - self.with_regressions

    @property
    def ties(self) -> int:
        """Divergences that rounding explains."""
        return sum(one.is_tie for one in self._findings())

    @property
    def regressions(self) -> int:
        """Divergences that it does not."""
        return sum(not one.is_tie for one in self._findings())

    @property
    def worst(self) -> Finding | None:
        """The one with the most regret; one that has none, since a text ended, before all."""
        return max(
            self._findings(),
            # Not a number: worse than anything.
            key=lambda one: math.inf if math.isnan(one.regret) else one.regret,
            default=None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Counts, and every divergence."""
        return {
            "concurrency": self.concurrency,
            "texts": len(self.texts),
            "identical": self.identical,
            "with_ties": self.with_ties,
            "with_regressions": self.with_regressions,
            "ties": self.ties,
            "regressions": self.regressions,
            "worst": self.worst and self.worst.to_dict(),
            "acceptance_length": self.acceptance_length,
            "drafts_verified": self.drafts_verified,
            "divergences": [one.to_dict() for one in self._findings()],
        }

    def _findings(self) -> Iterable[Finding]:
        return (one for text in self.texts for one in text)


@dataclass(frozen=True)
class Verification:
    """The gate's result."""

    about: dict[str, Any]
    """What was run: dtype, drafter, versions, tokens, and what the command adds."""
    tie: float
    """The most regret, in nat, that rounding may explain."""
    levels: tuple[Level, ...]

    @property
    def verdict(self) -> Verdict:
        """A regression anywhere is one; where nothing was drafted, nothing was shown."""
        if any(level.regressions for level in self.levels):
            return "regression"
        if not any(level.drafts_verified for level in self.levels):
            return "nothing drafted"
        return "lossless"

    @property
    def exit_code(self) -> int:
        """0: lossless, 1: a regression, 2: nothing was drafted."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, all of it."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "tie": self.tie,
            **self.about,
            "levels": [level.to_dict() for level in self.levels],
        }
