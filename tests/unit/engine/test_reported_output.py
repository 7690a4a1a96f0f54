"""What became of drafts comes with a step's output, and nobody waits for it before that."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.v2.exchange import (
    COUNTED,
    OUTCOMES,
    HostCopy,
    ReportedOutput,
    verified_drafts,
)
from vllm_dflash.engine.v2.grading import OUTCOME_COLUMNS
from vllm_dflash.planning.step import BLOCK, NO_DRAFTS, TEXT, Outcomes

NAMES = ["part", "all", "placeholders", "in its prompt", "none", "of its text"]
"""What became of each request's drafts."""
SOURCE = [BLOCK, BLOCK, NO_DRAFTS, NO_DRAFTS, BLOCK, TEXT]
ADMITTED = [7, 2, 4, 0, 3, 5]
COUNTS = [[3, 12, 5, 6], [1, 5, 4, 0]]
"""Verifications, drafts, accepted ones and ones that were not finite: of blocks, and of texts."""


@pytest.fixture
def reported() -> ReportedOutput:
    """Output of a step that has not been fetched yet."""
    output: Any = SimpleNamespace(
        model_runner_output=SimpleNamespace(kv_connector_output="of a connector"),
        get_output=lambda: SimpleNamespace(req_ids=NAMES),
    )
    table = torch.zeros(len(NAMES), OUTCOME_COLUMNS + 7)
    table[:, 0], table[:, 1] = torch.tensor(SOURCE), torch.tensor(ADMITTED)
    table[:, 2], table[:, 8:11], table[:, 11], table[1, 12:] = 9.0, 3.0, 0.25, -1.0
    counts = torch.tensor(COUNTS)
    report = HostCopy(None, table, counts)
    for each in (table, counts):
        each.fill_(99)  # overwritten by the next step
    return ReportedOutput(output, report, DraftStatistics(7))


def test_what_the_device_has_counted_is_shown(reported: ReportedOutput) -> None:
    """Since the engine's start: it replaces what was known before. Nothing is counted before the
    output is fetched."""
    shown = reported._statistics
    assert shown.counts() == DraftStatistics(7).counts()
    shown.draft_tokens = 4
    counts = COUNTED.on(reported.get_output())
    assert counts is not None
    assert counts.tolist() == COUNTS
    assert (shown.verifications, shown.draft_tokens, shown.accepted_tokens) == (4, 17, 9)
    assert (shown.free_verifications, shown.free_draft_tokens) == (1, 5)
    assert (shown.free_accepted_tokens, shown.nan_drafts) == (4, 6)
    assert reported.get_kv_connector_output() == "of a connector"


def test_what_the_device_saw_goes_to_the_scheduler(reported: ReportedOutput) -> None:
    table = OUTCOMES.on(reported.get_output())
    assert table is not None
    assert verified_drafts(table) == [7, 2, 0, 0, 3, 5]
    outcomes = Outcomes.from_table(table, 3)
    assert outcomes.source.tolist() == SOURCE
    assert outcomes.admitted.tolist() == ADMITTED
    assert outcomes.matches.tolist() == [9] * len(NAMES)
    assert outcomes.tokens_if_truncated.tolist() == [[3] * 3] * len(NAMES)
    assert outcomes.confidence[:, 0].tolist() == [0.25] * len(NAMES)
    assert not outcomes.confidence[:, 1:].any()  # 0 if it was not finite
    assert outcomes.confidence.shape == (len(NAMES), 7)
