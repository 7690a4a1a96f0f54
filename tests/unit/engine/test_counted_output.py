"""Drafts that nobody waits for: what is counted, and when."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.v2.counted_output import OUTCOMES, CountedOutput, VerifiedDrafts
from vllm_dflash.planning.ahead import BLOCK, NOBODY, TEXT

NAMES = ["part", "all", "undrafted", "in its prompt", "none", "of its text"]
"""What became of each one's drafts."""
SOURCE = [BLOCK, BLOCK, NOBODY, NOBODY, BLOCK, TEXT]
ADMITTED = [7, 2, 0, 0, 3, 5]
SAMPLED = [[5] * 4, [5] * 3, [5], [], [5], [5] * 6]


def run(admitted: set[str]) -> tuple[DraftStatistics, CountedOutput]:
    """A step whose output is not fetched yet; some requests were just admitted."""
    output: Any = SimpleNamespace(
        model_runner_output=SimpleNamespace(kv_connector_output="of a connector"),
        get_output=lambda: SimpleNamespace(sampled_token_ids=SAMPLED),
    )
    statistics = DraftStatistics(7)
    of_device = torch.zeros(len(NAMES), 6 + 7)
    of_device[:, 0], of_device[:, 1] = torch.tensor(SOURCE), torch.tensor(ADMITTED)
    of_device[:, 2], of_device[:, 6] = 9.0, 0.25
    drafts = VerifiedDrafts(NAMES, admitted, of_device)
    of_device.fill_(99)  # the next step's
    return statistics, CountedOutput(output, drafts, statistics)


def counted(statistics: DraftStatistics) -> tuple[int, int, int]:
    return statistics.verifications, statistics.draft_tokens, statistics.accepted_tokens


@pytest.mark.parametrize(
    ("admitted", "expected"),
    [
        (set(), (4, 17, 10)),
        ({"part"}, (3, 10, 7)),
        ({"none"}, (3, 14, 10)),
        ({*NAMES}, (0, 0, 0)),
    ],
)
def test_drafts_verified_and_accepted(admitted: set[str], expected: tuple[int, int, int]) -> None:
    """Also where the device has dropped some: it says how many it kept."""
    statistics, output = run(admitted)
    assert statistics.draft_tokens == 0  # nobody has waited yet
    assert output.get_output().sampled_token_ids is SAMPLED
    assert counted(statistics) == expected


@pytest.mark.parametrize(("admitted", "expected"), [(set(), (1, 5, 5)), ({NAMES[-1]}, (0, 0, 0))])
def test_free_ones_are_counted_as_such(admitted: set[str], expected: tuple[int, int, int]) -> None:
    statistics, output = run(admitted)
    output.get_output()
    found = statistics.free_verifications, statistics.free_draft_tokens
    assert (*found, statistics.free_accepted_tokens) == expected


def test_what_the_device_saw_goes_to_the_scheduler() -> None:
    _, output = run(set())
    outcomes = OUTCOMES.on(output.get_output())
    assert outcomes is not None
    assert outcomes.source.tolist() == SOURCE
    assert outcomes.admitted.tolist() == ADMITTED
    assert outcomes.matches.tolist() == [9] * len(NAMES)
    assert outcomes.confidence[:, 0].tolist() == [0.25] * len(NAMES)
    assert outcomes.confidence.shape == (len(NAMES), 7)


def test_what_is_attached_to_the_output_goes_with_it() -> None:
    _, output = run(set())
    inner: Any = output._output
    assert output.model_runner_output is inner.model_runner_output
    assert output.get_kv_connector_output() == "of a connector"
