"""What texts predict on the device, against a plain search; in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.searched_texts import CPU, look_up
from vllm_dflash.engine.v2 import text_look_up
from vllm_dflash.engine.v2.draft_slots import Batch
from vllm_dflash.engine.v2.text_look_up import TILE, TextLookUp
from vllm_dflash.planning.texts import LONGEST, SHORTEST

pytestmark = pytest.mark.v2
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=60)


def check(requests: list[list[int]], width: int, in_prompt: int = -1) -> None:
    found, expected = look_up(requests, width, in_prompt)
    assert found.tolist() == expected.tolist()


@given(
    requests=st.lists(TEXTS, min_size=1, max_size=4),
    width=st.sampled_from([1, 3, 7, 15]),
    in_prompt=st.integers(-1, 3),
)
def test_texts_predict_what_followed_their_last_tokens(
    requests: list[list[int]], width: int, in_prompt: int
) -> None:
    check(requests, width, in_prompt)


@pytest.mark.parametrize("most_programs", [1, 4, 4096])
@pytest.mark.parametrize("start", [0, 40, TILE - LONGEST // 2, 2 * TILE - 1, 2 * TILE + 30])
def test_texts_longer_than_a_tile(
    start: int, most_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The match lies anywhere, also across two tiles. Programs take one part or several."""
    monkeypatch.setattr(text_look_up, "MOST_PROGRAMS", most_programs)
    text = [*range(100, 100 + 3 * TILE)]
    copied = text[start : start + LONGEST + 5]
    check([[*text, *copied], [*text[:50], 3, 100, 101], [*text, *copied[:SHORTEST]]], 7)


def test_no_match_goes_on_in_the_text_before() -> None:
    """Texts that fill their rows are adjacent in memory."""
    texts = torch.tensor([[0, 0, 0, 0, 3], [1, 2, 3, 1, 2]], dtype=torch.int32)
    one, lens = torch.ones(1, dtype=torch.int32), torch.tensor([5, 5], dtype=torch.int32)
    found, newest = TextLookUp(1, 5, 2, CPU), torch.tensor([[3], [2]])
    found.look_up(Batch(torch.tensor([1]), one, texts, lens, newest))
    assert found.matches.tolist() == [2]
    assert found.tokens.tolist() == [[3, 1]]
