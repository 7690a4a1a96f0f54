"""Drafts that nobody waits for: what is counted, and when."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_dflash.engine.statistics import DraftStatistics
from vllm_dflash.engine.v2.counted_output import CountedOutput, VerifiedDrafts

NAMES = ["part", "all", "undrafted", "in its prompt", "none"]
"""What became of each one's drafts."""
LENGTHS = np.array([7, 2, 0, 0, 3], dtype=np.int32)
SAMPLED = [[5] * 4, [5] * 3, [5], [], [5]]


def run(
    lengths: np.ndarray | None, admitted: set[str], *, verified: int
) -> tuple[DraftStatistics, CountedOutput]:
    """A step whose device verified so many drafts in all; its output is not fetched yet."""
    batch: Any = SimpleNamespace(
        req_ids=NAMES, num_draft_tokens_per_req=lengths, num_draft_tokens=verified
    )
    output: Any = SimpleNamespace(
        model_runner_output=SimpleNamespace(),
        get_output=lambda: SimpleNamespace(sampled_token_ids=SAMPLED),
    )
    statistics = DraftStatistics(7)
    return statistics, CountedOutput(output, VerifiedDrafts(batch, admitted), statistics)


@pytest.mark.parametrize(
    ("admitted", "expected"),
    [
        (set(), (3, 12, 5)),
        ({"part"}, (2, 5, 2)),
        ({"none"}, (2, 9, 5)),
        ({*NAMES}, (0, 0, 0)),
    ],
)
def test_blocks_drafts_and_accepted_ones(
    admitted: set[str], expected: tuple[int, int, int]
) -> None:
    statistics, output = run(LENGTHS, admitted, verified=12)
    assert statistics.draft_tokens == 0  # nobody has waited yet
    assert output.get_output().sampled_token_ids is SAMPLED
    found = statistics.verifications, statistics.draft_tokens, statistics.accepted_tokens
    assert found == expected


def test_drafts_that_the_device_dropped_were_not_verified() -> None:
    statistics, output = run(LENGTHS, set(), verified=8)
    output.get_output()
    assert (statistics.draft_tokens, statistics.accepted_tokens) == (8, 5)


def test_dropped_placeholders_do_not_hide_what_was_accepted() -> None:
    """The device says how many it dropped, but not whose."""
    statistics, output = run(LENGTHS, {"part"}, verified=3)
    output.get_output()
    assert (statistics.draft_tokens, statistics.accepted_tokens) == (2, 2)


def test_a_step_without_drafts() -> None:
    statistics, output = run(None, set(), verified=0)
    output.get_output()
    assert statistics.verifications == 0


def test_what_is_attached_to_the_output_goes_with_it() -> None:
    _, output = run(LENGTHS, set(), verified=12)
    inner: Any = output._output
    assert output.model_runner_output is inner.model_runner_output
