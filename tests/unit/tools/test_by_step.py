"""Which tokens came together, on an engine that plays back steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vllm_dflash.tools.by_step import write_by_step
from vllm_dflash.tools.stepped_engine import Output


class Playback:
    """Gives one request these tokens, step by step; the last step ends it."""

    def __init__(self, steps: list[list[int]]) -> None:
        self.steps = steps
        self.asked: list[int] = []
        self.aborted: list[str] = []

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> None:
        self.asked.append(max_tokens)

    def step(self) -> list[Output]:
        tokens = self.steps.pop(0)
        return [Output("by step", tokens, not self.steps)] if tokens else []

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def by_step(engine: Playback, tokens: int) -> list[list[str]]:
    return [*write_by_step(engine, decode, [1, 2], tokens)]  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [4, 5])
def test_steps_are_whole(tokens: int) -> None:
    engine = Playback([[97], [98, 99, 100, 101], [102], [103]])
    assert by_step(engine, tokens) == [["a"], ["b", "c", "d", "e"]]
    assert engine.aborted == ["by step"]
    assert engine.asked[0] >= tokens + 16  # so that vLLM cuts no step short either


def test_the_token_that_ends_a_text_is_not_shown() -> None:
    engine = Playback([[97, 98], [], [99, 100]])
    assert by_step(engine, 9) == [["a", "b"], ["c", ""]]
    assert not engine.aborted


def test_text_of_a_character_in_two_tokens() -> None:
    ae = "ä".encode()
    engine = Playback([[97, ae[0]], [ae[1], 98, 99], [1], [2]])
    assert by_step(engine, 5) == [["a", ""], ["ä", "b", "c"]]
