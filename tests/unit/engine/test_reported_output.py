"""What became of drafts comes with a step's output, and nobody waits for it before that."""

from types import SimpleNamespace
from typing import Any

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


def run() -> tuple[DraftStatistics, ReportedOutput]:
    """A step whose output has not been fetched yet."""
    output: Any = SimpleNamespace(
        model_runner_output=SimpleNamespace(kv_connector_output="of a connector"),
        get_output=lambda: SimpleNamespace(req_ids=NAMES),
    )
    statistics = DraftStatistics(7)
    table = torch.zeros(len(NAMES), OUTCOME_COLUMNS + 7)
    table[:, 0], table[:, 1] = torch.tensor(SOURCE), torch.tensor(ADMITTED)
    table[:, 2], table[:, 8:11], table[:, 11], table[1, 12:] = 9.0, 3.0, 0.25, -1.0
    counts = torch.tensor(COUNTS)
    report = HostCopy(None, table, counts)
    for each in (table, counts):
        each.fill_(99)  # overwritten by the next step
    return statistics, ReportedOutput(output, report, statistics)


def test_what_the_device_has_counted_is_shown() -> None:
    """Since the engine's start: it replaces what was known before."""
    statistics, output = run()
    statistics.draft_tokens = 4
    counts = COUNTED.on(output.get_output())
    assert counts is not None
    assert counts.tolist() == COUNTS
    shown = statistics.verifications, statistics.draft_tokens, statistics.accepted_tokens
    assert shown == (4, 17, 9)
    free = statistics.free_verifications, statistics.free_draft_tokens
    assert (*free, statistics.free_accepted_tokens) == (1, 5, 4)
    assert statistics.nan_drafts == 6


def test_nothing_is_counted_before_the_output_is_fetched() -> None:
    statistics, _ = run()
    assert statistics.counts() == DraftStatistics(7).counts()


def test_what_the_device_saw_goes_to_the_scheduler() -> None:
    _, output = run()
    table = OUTCOMES.on(output.get_output())
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


def test_what_is_attached_to_the_output_goes_with_it() -> None:
    _, output = run()
    inner: Any = output._output
    assert output.model_runner_output is inner.model_runner_output
    assert output.get_kv_connector_output() == "of a connector"
