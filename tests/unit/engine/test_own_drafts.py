"""Which verified drafts V1's step takes for its own, by what it handed over."""

from __future__ import annotations

import numpy as np
import pytest

from support.scripted_host import Host, Scripted, drafting
from vllm_dflash.engine.v1 import host_step
from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.step import StepRecord


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_step, "from_rank_0", lambda value: value)


def counted(host: Host) -> tuple[int, int, int]:
    found = host.statistics
    return found.verifications, found.draft_tokens, found.accepted_tokens


def handed_over(*from_text: bool, lengths: tuple[int, ...] = (2, 2, 2)) -> Host:
    """Hand over drafts of these lengths, by default for three requests. `from_text`: which of them
    come from a text."""
    count = len(lengths)

    class Told(Scripted):
        def choose(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
            return np.array(lengths), np.array(from_text or [False] * count)

    host = Host(Told(drafting(*[True] * count)), looks_up=True)
    host.step(*[7] * count)
    return host


@pytest.mark.parametrize(
    ("admitted", "ended", "expected"),
    [
        (set(), set(), (2, 4, 1)),
        ({"b"}, {"of another batch"}, (1, 2, 1)),
        (set(), {"a"}, (1, 2, 0)),
        ({"a", "b", "elsewhere"}, set(), (0, 0, 0)),
    ],
)
def test_placeholders_are_no_drafts(
    admitted: set[str], ended: set[str], expected: tuple[int, int, int]
) -> None:
    """They go to a request that comes back, or whose name another request has by now. All drafts of
    the second request were rejected; the third had none in this step."""
    host = handed_over()
    host.begin_step(admitted, ended)
    host.verify("abc", [2, 2, 0], [2, 1, 1])
    assert counted(host) == expected


def test_drafts_of_a_request_that_was_given_none_are_vllms() -> None:
    host = handed_over()
    step = host.verify("abd", [2, 2, 7], [1, 1, 1])
    assert step.verified.tolist() == [2, 2, 0]


def test_a_sample_that_is_discarded_says_nothing() -> None:
    host = handed_over()
    assert host.verify("abc", [2, 2, 2], [1, 0, 3]).verified.tolist() == [2, 0, 2]


def test_free_drafts_are_known_until_they_are_verified() -> None:
    """They are known by name: the batch may be another one, and a request may have to wait. The
    second request was given none."""
    host = handed_over(False, False, True, True, lengths=(2, 0, 2, 2))
    host.verify("xy", [0, 0], [1, 1])
    step = host.verify("ca", [2, 2], [3, 2])
    assert step.verified_free.tolist() == [2, 0]
    assert counted(host) == (2, 4, 3)
    found = host.statistics
    assert (found.free_verifications, found.free_draft_tokens) == (1, 2)
    assert found.free_accepted_tokens == 2
    assert host.verify("cab", [2, 2, 2], [3, 2, 1]).verified.tolist() == [0, 0, 0]
    assert host.verify("d", [1], [1]).verified_free.tolist() == [1]
