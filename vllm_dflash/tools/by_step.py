"""A text step by step, as `demo` shows it: what each step of an engine brought."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vllm_dflash.tools.stepped_engine import SteppedEngine

MOST_IN_A_STEP = 64
"""Tokens; no block of a drafter is as long."""
INCOMPLETE = "\ufffd"


def write_by_step(
    engine: SteppedEngine,
    decode: Callable[[Sequence[int]], str],
    prompt: Sequence[int],
    tokens: int,
) -> Iterator[list[str]]:
    """The text of each token, by the step of the engine that brought it, as they come.

    The last token of a step is the target's own (the bonus token), those before it are accepted
    drafts. Of a character in several tokens, the last one has all. All steps are whole, so there
    may be some tokens more than asked for; the token that ends a text has none itself.
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
