"""The gate's result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

SCHEMA = "vllm-dflash.verify/1"
Verdict = Literal["lossless", "regression", "nothing drafted"]
EXIT_CODES: Mapping[Verdict, int] = {"lossless": 0, "regression": 1, "nothing drafted": 2}


@dataclass(frozen=True)
class Finding:
    """A divergence with its prompt, and with tokens as text."""

    prompt: int
    """Index of the prompt, from 0."""
    position: int
    """Number of the text's tokens before it."""
    dflash: str | None
    plain: str | None
    """What each wrote there; None if its text has ended."""
    regret: float
    """Regret of DFlash's token, in nat; infinite if one text has ended."""
    is_tie: bool

    def __str__(self) -> str:
        def word(token: str | None) -> str:
            return "the end" if token is None else repr(token)

        regret = f"{self.regret:.3g} nat" if math.isfinite(self.regret) else "not a tie"
        return (
            f"{regret} at prompt {self.prompt}, position {self.position}: DFlash wrote"
            f" {word(self.dflash)}, plain decoding {word(self.plain)}"
        )


@dataclass(frozen=True)
class Level:
    """Results of all texts at one concurrency."""

    concurrency: int
    texts: int
    identical: int
    """Texts without any divergence."""
    with_ties: int
    """Texts that diverge only in ties."""
    with_regressions: int
    ties: int
    """Divergences that rounding explains."""
    regressions: int
    """Divergences that rounding does not explain."""
    worst: Finding | None
    """The divergence with the largest regret; NaN ranks above infinity."""
    acceptance_length: float | None
    """Mean tokens per verification of a request, including the bonus token; None without any."""
    drafts_verified: int
    """Drafts that the target verified, as counted by vLLM."""
    divergences: tuple[Finding, ...]

    @classmethod
    def of(
        cls,
        concurrency: int,
        drafts_verified: int,
        acceptance_length: float | None,
        texts: Sequence[Sequence[Finding]],
    ) -> Level:
        """Count the divergences of each text."""
        found = tuple(one for text in texts for one in text)
        identical = sum(not text for text in texts)
        with_regressions = sum(any(not one.is_tie for one in text) for text in texts)
        ties = sum(one.is_tie for one in found)
        return cls(
            concurrency=concurrency,
            texts=len(texts),
            identical=identical,
            with_ties=len(texts) - identical - with_regressions,
            with_regressions=with_regressions,
            ties=ties,
            regressions=len(found) - ties,
            # NaN is worse than anything.
            worst=max(found, key=lambda one: (math.isnan(one.regret), one.regret), default=None),
            acceptance_length=acceptance_length,
            drafts_verified=drafts_verified,
            divergences=found,
        )


@dataclass(frozen=True)
class Verification:
    """Result of comparing DFlash with plain decoding."""

    about: dict[str, Any]
    """What was run: prompts, tokens, dtype, drafter, versions, and what the command adds."""
    tie: float
    """Largest regret of a tie, in nat."""
    levels: tuple[Level, ...]

    @property
    def verdict(self) -> Verdict:
        """A regression at any level, else whether any draft was verified."""
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
        """Return JSON values; a regret that is not finite becomes None."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "tie": self.tie,
            **self.about,
            "levels": [asdict(level, dict_factory=_finite) for level in self.levels],
        }


def _finite(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields
    }
