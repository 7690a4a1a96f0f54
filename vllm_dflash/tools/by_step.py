"""A text step by step, as `demo` shows it: what each step of an engine brought."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_dflash.tools.loads import SteppedEngine

MOST_IN_A_STEP = 64
"""Tokens; no block of a drafter is as long."""
INCOMPLETE = "\ufffd"


def write_by_step(
    engine: SteppedEngine,
    decode: Callable[[Sequence[int]], str],
    prompt: Sequence[int],
    tokens: int,
) -> list[list[str]]:
    """The text of each token, by the step of the engine that brought it.

    The last token of a step is the target's own (the bonus token), those before it are accepted
    drafts. All steps are whole, so there may be some tokens more than asked for; a step that the
    end of the text cut short is left out.
    """
    engine.add("by step", prompt, tokens + MOST_IN_A_STEP)
    steps: list[Sequence[int]] = []
    finished = False
    while not finished and sum(map(len, steps)) < tokens:
        for output in engine.step():
            finished = output.finished
            if not finished:
                steps.append(output.token_ids)
    if not finished:
        engine.abort(["by step"])
    pieces = iter(_pieces(decode, [token for step in steps for token in step]))
    return [[next(pieces) for _ in step] for step in steps]


def _pieces(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text; of a character in several tokens, the last one all."""
    pieces, shown = [], ""
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[:end])
        complete = not text.endswith(INCOMPLETE)
        pieces.append(text[len(shown) :] if complete else "")
        shown = text if complete else shown
    return pieces
