"""What the gate found."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from vllm_dflash.tools.verify.divergence import Divergence

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
class Drafting:
    """What vLLM counted while the texts were written."""

    verified: int
    """Drafts the target verified."""
    acceptance_length: float | None
    """Tokens of a verify step of a request, bonus token included; None: there were no such."""

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float]) -> Drafting:
        """Of two looks at `EngineAnswers.counts`."""
        steps, verified, accepted = (
            after.get(name, 0.0) - before.get(name, 0.0)
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        return cls(int(verified), 1 + accepted / steps if steps else None)


@dataclass(frozen=True)
class Level:
    """All texts, written so many at a time."""

    concurrency: int
    drafting: Drafting
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
            "acceptance_length": self.drafting.acceptance_length,
            "drafts_verified": self.drafting.verified,
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
        if not any(level.drafting.verified for level in self.levels):
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


def describe(
    divergences: Sequence[Sequence[Divergence]], tie: float, word: Callable[[int], str]
) -> tuple[tuple[Finding, ...], ...]:
    """Divergences of each prompt's text, readable; `word` gives a token's text."""

    def finding(prompt: int, one: Divergence) -> Finding:
        tokens = (one.dflash, one.plain)
        dflash, plain = (None if token is None else word(token) for token in tokens)
        return Finding(prompt, one.position, dflash, plain, one.regret, one.is_tie(tie))

    return tuple(
        tuple(finding(number, one) for one in text) for number, text in enumerate(divergences)
    )
