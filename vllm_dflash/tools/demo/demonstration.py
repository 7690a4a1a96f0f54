"""What a demonstration does: engines one after the other write the same texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vllm_dflash.tools.bench.sides import OURS, PLAIN, Side
from vllm_dflash.tools.engine_answers import EngineAnswers, Request, complete
from vllm_dflash.tools.progress import Progress, Tell
from vllm_dflash.tools.verify.gate import drafting_between

TEXTS = {1: (3, 6), 8: (16, 16)}
"""How many texts are written, by how many of them at a time: first some that do not count, since
kernels are prepared and costs learned when a batch first comes by."""
SHOWN = 2
"""Texts that are shown by the step."""


@dataclass(frozen=True)
class Written:
    """What one engine wrote, so many texts at a time."""

    texts: list[list[int]]
    tokens_per_second: float
    acceptance_length: float | None


@dataclass
class Demonstration:
    """All that was seen."""

    sides: list[Side]
    dtype: str
    levels: dict[int, dict[str, Written]]
    """By how many requests at a time, and by side."""
    by_step: list[tuple[str, list[list[str]]]]
    """Prompts, and what followed: the text of each token, by the step that brought it."""

    def identical(self, concurrency: int, side: Side) -> int:
        """Texts that are plain decoding's, token for token."""
        level = self.levels[concurrency]
        pairs = zip(level[side.name].texts, level[PLAIN].texts, strict=True)
        return sum(mine == plain for mine, plain in pairs)

    @property
    def all_identical(self) -> bool:
        """Whether every side wrote what plain decoding wrote."""
        return all(
            self.identical(count, side) == len(level[PLAIN].texts)
            for count, level in self.levels.items()
            for side in self.sides
        )


def demonstrate(
    target: str,
    sides: Sequence[Side],
    prompts: list[str],
    tokens: int,
    *,
    dtype: str,
    flags: Sequence[str],
    logs: Path,
    progress: Progress,
) -> Demonstration:
    """Write texts of so many tokens on every side, each in an engine of its own, in turn.

    Plain decoding and ours are among the sides; `flags` are those of `vllm serve`.

    Raises:
        ValueError: an engine refused its arguments.
        EngineDied: an engine did.
    """
    found = Demonstration([*sides], "", {count: {} for count in TEXTS}, [])
    # Ours first: it is the one that finds fault with a pair.
    for number, side in enumerate(sorted(sides, key=lambda side: side.name != OURS), 1):
        with side.start(logs, model=target, dtype=dtype, flags=[*flags]) as process:
            name = f"engine {number} of {len(sides)} ({side.name})"
            with progress.stage(f"{name}: starting"):
                found.dtype = process.answers.facts()["dtype"]
                encoded = process.answers.encode(texts=prompts)
            total = sum(len(encoded[:texts]) for passes in TEXTS.values() for texts in passes)
            with progress.stage(f"{name}: writing", total, "texts") as tell:
                for count, written in _write(process.answers, encoded, tokens, tell).items():
                    found.levels[count][side.name] = written
                if side.name == OURS:
                    found.by_step = [
                        (prompt, process.answers.by_step(prompt=ids, tokens=tokens))
                        for prompt, ids in zip(prompts[:SHOWN], encoded, strict=False)
                    ]
    return found


def _write(
    engine: EngineAnswers, encoded: list[list[int]], tokens: int, tell: Tell
) -> dict[int, Written]:
    written: dict[int, Written] = {}
    done = 0
    for count, passes in TEXTS.items():
        for texts in passes:
            requests = [Request(prompt, tokens) for prompt in encoded[:texts]]
            before, started = engine.counts(), time.perf_counter()
            finished = complete(engine, requests, count, partial(_tell_after, tell, done))
            seconds, after = time.perf_counter() - started, engine.counts()
            done += len(requests)
            ids = [one.tokens for one in finished]
            _, length = drafting_between(before, after)
            written[count] = Written(ids, sum(map(len, ids)) / seconds, length)
    return written


def _tell_after(tell: Tell, earlier: int, now: int) -> None:
    tell(earlier + now)
