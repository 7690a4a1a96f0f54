"""Drafts that the host does not wait for: what is counted, and when."""

from types import SimpleNamespace
from typing import Any

import torch

from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.v2.exchange import OUTCOMES, CountedOutput, HostCopy
from vllm_dflash.engine.v2.grading import OUTCOME_COLUMNS
from vllm_dflash.planning.step import BLOCK, NO_DRAFTS, TEXT, Outcomes

NAMES = ["part", "all", "undrafted", "in its prompt", "none", "of its text"]
"""What became of each request's drafts."""
SOURCE = [BLOCK, BLOCK, NO_DRAFTS, NO_DRAFTS, BLOCK, TEXT]
ADMITTED = [7, 2, 0, 0, 3, 5]
SAMPLED = [[5] * 4, [5] * 3, [5], [], [5], [5] * 6]


def run() -> tuple[DraftStatistics, CountedOutput]:
    """A step whose output has not been fetched yet."""
    output: Any = SimpleNamespace(
        model_runner_output=SimpleNamespace(kv_connector_output="of a connector"),
        get_output=lambda: SimpleNamespace(req_ids=NAMES, sampled_token_ids=SAMPLED),
    )
    statistics = DraftStatistics(7)
    of_device = torch.zeros(len(NAMES), OUTCOME_COLUMNS + 7)
    of_device[:, 0], of_device[:, 1] = torch.tensor(SOURCE), torch.tensor(ADMITTED)
    of_device[:, 2], of_device[:, 8:11], of_device[:, 11], of_device[1, 12:] = 9.0, 3.0, 0.25, -1.0
    report = HostCopy(of_device)
    of_device.fill_(99)  # overwritten by the next step
    return statistics, CountedOutput(output, report, statistics)


def test_drafts_verified_and_accepted() -> None:
    """Also if the device dropped some: it reports how many it kept."""
    statistics, output = run()
    statistics.nan_drafts = 4  # from earlier steps
    assert statistics.draft_tokens == 0  # the output was not fetched yet
    assert output.get_output().sampled_token_ids is SAMPLED
    found = statistics.verifications, statistics.draft_tokens, statistics.accepted_tokens
    assert found == (4, 17, 10)
    free = statistics.free_verifications, statistics.free_draft_tokens
    assert (*free, statistics.free_accepted_tokens) == (1, 5, 5)
    assert statistics.nan_drafts == 4 + 6


def test_what_the_device_saw_goes_to_the_scheduler() -> None:
    _, output = run()
    table = OUTCOMES.on(output.get_output())
    assert table is not None
    outcomes = Outcomes.of(table, 3)
    assert outcomes.source.tolist() == SOURCE
    assert outcomes.admitted.tolist() == ADMITTED
    assert outcomes.matches.tolist() == [9] * len(NAMES)
    assert outcomes.if_cut.tolist() == [[3] * 3] * len(NAMES)
    assert outcomes.confidence[:, 0].tolist() == [0.25] * len(NAMES)
    assert not outcomes.confidence[:, 1:].any()  # 0 if it was not finite
    assert outcomes.confidence.shape == (len(NAMES), 7)


def test_what_is_attached_to_the_output_goes_with_it() -> None:
    _, output = run()
    inner: Any = output._output
    assert output.model_runner_output is inner.model_runner_output
    assert output.get_kv_connector_output() == "of a connector"
