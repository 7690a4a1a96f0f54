"""Generates a text step by step, for `demo`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vllm_dflash.tools.stepped_engine import SteppedEngine

MOST_IN_A_STEP = 64
"""Tokens; longer than any drafter's block."""
INCOMPLETE = "\ufffd"


def write_by_step(
    engine: SteppedEngine,
    decode: Callable[[Sequence[int]], str],
    prompt: Sequence[int],
    tokens: int,
) -> Iterator[list[str]]:
    """Yield the texts of the new tokens, one list per engine step.

    The last token of a step is the target's own (the bonus token); those before it are accepted
    drafts. A character made of several tokens is the text of the last of them. Steps are never cut,
    so there may be a few more than `tokens` tokens. A token that ends the text has an empty text.
    """
    engine.add("by step", prompt, tokens + MOST_IN_A_STEP)
    written: list[int] = []
    shown, is_finished = "", False
    while not is_finished and len(written) < tokens:
        for output in engine.step():
            is_finished = output.finished
            pieces = []
            for token in output.token_ids:
                written.append(token)
                text = decode(written)
                is_whole = not text.endswith(INCOMPLETE)
                pieces.append(text[len(shown) :] if is_whole else "")
                shown = text if is_whole else shown
            if is_finished:
                pieces[-1:] = [""]
            yield pieces
    if not is_finished:
        engine.abort(["by step"])
