"""Drafts that nobody waits for: what is counted, and when."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_dflash.engine.statistics import DraftStatistics
from vllm_dflash.engine.v2.counted_output import CountedOutput, VerifiedDrafts

NAMES = ["part", "all", "undrafted", "in its prompt", "none"]
"""What became of each one's drafts."""
LENGTHS = np.array([7, 2, 0, 0, 3], dtype=np.int32)
SAMPLED = [[5] * 4, [5] * 3, [5], [], [5]]


def run(
    lengths: np.ndarray | None, admitted: set[str], rejected: list[int] | None = None
) -> tuple[DraftStatistics, CountedOutput]:
    """A step whose output is not fetched yet; `rejected` where the device has dropped some."""
    batch: Any = SimpleNamespace(req_ids=NAMES, num_draft_tokens_per_req=lengths)
    output: Any = SimpleNamespace(
        model_runner_output=SimpleNamespace(kv_connector_output="of a connector"),
        get_output=lambda: SimpleNamespace(sampled_token_ids=SAMPLED),
    )
    statistics = DraftStatistics(7)
    of_device = None if rejected is None else torch.tensor(rejected, dtype=torch.int32)
    drafts = VerifiedDrafts(batch, admitted, of_device)
    if of_device is not None:
        of_device.fill_(99)  # the next step's
    return statistics, CountedOutput(output, drafts, statistics)


def counted(statistics: DraftStatistics) -> tuple[int, int, int]:
    return statistics.verifications, statistics.draft_tokens, statistics.accepted_tokens


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
    statistics, output = run(LENGTHS, admitted)
    assert statistics.draft_tokens == 0  # nobody has waited yet
    assert output.get_output().sampled_token_ids is SAMPLED
    assert counted(statistics) == expected


@pytest.mark.parametrize(
    ("admitted", "expected"), [(set(), (2, 6, 5)), ({"part"}, (1, 2, 2)), ({"none"}, (2, 6, 5))]
)
def test_drafts_that_the_device_dropped_were_not_verified(
    admitted: set[str], expected: tuple[int, int, int]
) -> None:
    """Of the first request's seven, three; of the last one's three, all."""
    statistics, output = run(LENGTHS, admitted, rejected=[1, 0, 0, 0, 0])
    output.get_output()
    assert counted(statistics) == expected


def test_a_step_without_drafts() -> None:
    statistics, output = run(None, set())
    output.get_output()
    assert statistics.verifications == 0


def test_what_is_attached_to_the_output_goes_with_it() -> None:
    _, output = run(LENGTHS, set())
    inner: Any = output._output
    assert output.model_runner_output is inner.model_runner_output
    assert output.get_kv_connector_output() == "of a connector"
