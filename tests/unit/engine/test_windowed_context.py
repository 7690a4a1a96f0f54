"""What the drafter's attention reads on Model Runner V2 if draft windows are chosen."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.left_out_blocks import Case, expected, windowed
from vllm_dflash.engine.v2.block_timer import BlockTimer
from vllm_dflash.engine.v2.exchange import Directions
from vllm_dflash.engine.v2.windows_ahead import WindowsAhead
from vllm_dflash.planning.ahead import AheadPlanner
from vllm_dflash.planning.window import LEAST_CONTEXT, TOKENS, WHOLE, Window

pytestmark = pytest.mark.v2


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=4),
    st.integers(0, 80),
    st.integers(0, 200),
    st.sampled_from([(16,), (32,), (16, 24)]),
)
def test_tables_and_lengths_by_hand(
    lens: list[int], tokens: int, shortest: int, sizes: tuple[int, ...]
) -> None:
    case = Case(len(lens), 300, Window(tokens, shortest, 0), sizes, block_rows=4)
    context_lens = np.array(lens, np.int32)
    found, tables = windowed(context_lens, case)
    new_lens, rows = expected(context_lens, case, tables)
    assert found.lens.tolist() == new_lens
    for table, row in zip(found.tables.input_block_tables, rows, strict=False):
        assert table.tolist() == row.tolist()
    # Other groups keep their own table, and vLLM's lengths stay as they are.
    assert found.tables.input_block_tables[-1] is tables[-1]
    assert found._lens[: len(lens)].tolist() == [4 + length for length in lens]
    assert max(new_lens) <= found.most_tokens(304)


def test_metadata_is_built_from_it_and_nothing_else() -> None:
    case = Case(2, 300, Window(32, 64, 0), block_rows=4)
    found, _ = windowed(np.array([300, 10], np.int32), case)
    whole = SimpleNamespace(block_tables=1, input_buffers=2, draft_max_seq_len=304)
    speculator = SimpleNamespace(**vars(whole))
    with found.substituted_in(speculator):
        assert speculator.block_tables is found.tables
        assert speculator.input_buffers is found.buffers
        assert speculator.draft_max_seq_len == 64 + 4
    assert speculator == whole
    found.attend_to(WHOLE)
    assert found.most_tokens(304) == 304
    found.write_shortened(2)
    assert found.lens[:2].tolist() == [304, 14]
    assert torch.equal(
        found.tables.input_block_tables[0][0], found._tables.input_block_tables[0][0]
    )


def test_outputs_tell_about_the_blocks_of_the_step_before() -> None:
    windows = WindowsAhead(8192, AheadPlanner(7, 3))
    lens = np.full(3, LEAST_CONTEXT + 5)
    nothing = [(0, 0)] * 3
    assert windows.chooser.report() == []
    with_block = windows.direct(Directions(runs_block=True), lambda: lens)
    assert with_block.window == Window(TOKENS[0], LEAST_CONTEXT, 0)
    windows.observe(with_block, [1, 1, 1], nothing, 1.0, None)  # no block before it
    without = Directions(runs_block=False)
    assert windows.direct(without, lambda: lens) is without
    verified = [(7, 0), (7, 7), (0, 0)]  # the second one's were free
    windows.observe(without, [4, 8, 1], verified, 0.5, 0.125)
    windows.observe(without, [4, 8, 1], verified, 0.5, None)  # no block before it
    whole, window, small = windows.chooser.classes[0].ways
    assert (window.verified, window.accepted) == (1, 3)
    assert (window.steps, window.seconds) == (1, pytest.approx(0.125 / 3))
    assert windows.chooser.classes[0].rest.seconds == pytest.approx(0.125)
    assert whole.verified == whole.steps == small.verified == small.steps == 0
    (reported,) = windows.chooser.report()
    assert reported["block_ms"] == [0.0, pytest.approx(125 / 3, abs=0.001), 0.0]


def test_steps_with_prompts_say_nothing_about_windows() -> None:
    """Their blocks' time includes storing prompts; it is known with the next step's output."""
    windows, lens = WindowsAhead(8192, AheadPlanner(7, 3)), np.full(3, LEAST_CONTEXT)
    for has_prompts in (False, True, False, False):
        one = windows.direct(Directions(True), lambda: lens)
        seconds = 10.0 if has_prompts else 0.1
        windows.observe(one, [1] * 3, [(0, 0)] * 3, seconds, 0.05, has_prompts=has_prompts)
    ways = windows.chooser.classes[0].ways
    assert sum(way.steps for way in ways) == 1


def test_steps_without_a_plan_keep_the_window_and_count() -> None:
    windows = WindowsAhead(8192, AheadPlanner(7, 3))
    lens = np.full(3, LEAST_CONTEXT)
    anew, again = Directions(True), Directions(True, has_new_plan=False)
    found = []
    for turn in range(20):
        one = windows.direct(again if turn % 4 else anew, lambda: lens)
        found.append(one.window.tokens)
    large, small = TOKENS
    assert found[:12] == [each for each in (large, small, 0) for _ in range(4)]
    assert found[12:] == [0] * 8  # the trial of 12 steps is over


def test_a_block_is_read_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.0, 10.0, 11.0])
    monkeypatch.setattr("vllm_dflash.engine.v2.block_timer.time.perf_counter", lambda: next(times))
    timer = BlockTimer(torch.device("cpu"))
    with timer.timing():
        pass
    assert timer.end_step() is None
    first = timer.end_step()  # a step without a block
    assert first is not None
    assert first.seconds() == 2.0
    with timer.timing():
        pass
    assert timer.end_step() is None
    second = timer.end_step()
    assert second is not None
    assert second.seconds() == 1.0
