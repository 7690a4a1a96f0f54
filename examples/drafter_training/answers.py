"""The target's own answers to prompts, written by vLLM to files in pieces."""

import json
from pathlib import Path

from vllm import LLM

from drafter_training.continuations import Pair, write_continuations

PIECE = 256
TEMPERATURE = 0.7
"""Sampling temperature of all answers to a prompt but the first, which is greedy."""


def write_answers(
    llm: LLM, prompts: list[list[int]], folder: Path, new_tokens: int, rounds: int = 1
) -> None:
    """Answer prompts, given as token ids, in pieces of 256, one file each.

    Pieces that exist are skipped.

    The first round is greedy, further rounds have a temperature of 0.7.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = len(prompts)
    prompts = prompts * rounds
    for start in range(0, len(prompts), PIECE):
        file = folder / f"{start // PIECE:03}.jsonl"
        if file.exists():
            continue
        partial = file.with_suffix(".partial")
        temperature = 0.0 if start < first else TEMPERATURE
        pairs = write_continuations(llm, prompts[start : start + PIECE], new_tokens, temperature)
        partial.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        partial.rename(file)


def read_answers(folder: Path) -> list[Pair]:
    """Read all pairs written so far, in the prompts' order."""
    return [pair for file in sorted(folder.glob("*.jsonl")) for pair in read_piece(file)]


def read_piece(file: Path) -> list[Pair]:
    """Read the pairs of one file, without endless repeats."""
    pairs = map(json.loads, file.read_text().splitlines())
    return [(prompt, without_repeats(answer)) for prompt, answer in pairs]


def without_repeats(answer: list[int], longest: int = 96) -> list[int]:
    """Cut an answer that ends in a loop after the loop's second round.

    Small models often loop. Such text is easy to draft, and teaches little.
    """
    for period in range(1, min(longest, len(answer) // 3) + 1):
        start = len(answer) - period
        while start > 0 and answer[start - 1] == answer[start - 1 + period]:
            start -= 1
        if len(answer) - start >= max(3 * period, 12):
            return answer[: start + 2 * period]
    return answer
