"""Warnings about drafts that are not finite or never accepted: once each, with advice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.log_lines import log_lines
from support.pairs import drafter_config, lilicorr_config
from vllm_dflash.checkpoint.read import parse_config, parse_overridden
from vllm_dflash.engine.reporting.log import ENOUGH_STEPS, ENOUGH_VERIFICATIONS, DraftWatch
from vllm_dflash.engine.reporting.statistics import DraftStatistics


class Watched:
    def __init__(self, **changes: Any) -> None:
        self.statistics = DraftStatistics(max_draft=7)
        drafter = parse_config("D", drafter_config(**changes))
        self.watch = DraftWatch(self.statistics, target="T", drafter=drafter)

    def look(self) -> list[str]:
        """Lines that are logged at the end of a step."""
        with log_lines() as lines:
            self.watch.tick()
        return lines

    def verify(self, times: int, accepted: int) -> list[str]:
        """Verify in as many steps as a warning needs; return the lines that are logged."""
        with log_lines() as lines:
            for _ in range(ENOUGH_STEPS - 1):
                self.watch.tick()
        self.statistics.verifications += times
        self.statistics.accepted_tokens += accepted
        return lines + self.look()

    def verify_free(self, times: int, accepted: int) -> list[str]:
        """Verify drafts that texts predicted."""
        self.statistics.free_verifications += times
        self.statistics.free_accepted_tokens += accepted
        return self.verify(times, accepted)


def test_drafts_that_are_not_finite() -> None:
    watched = Watched()
    assert watched.look() == []
    watched.statistics.nan_drafts = 3
    (warning,) = watched.look()
    assert "WARNING DFlash: the logits of 3 drafts were not finite" in warning
    assert "benchmarks/parity D --target T" in warning
    watched.statistics.nan_drafts = 4
    assert watched.look() == []  # it comes once


def test_acceptance_stuck_at_zero() -> None:
    """A tenth is little but something, and what came before does not count."""
    watched = Watched()
    assert watched.verify(256, accepted=200) == []
    assert watched.verify(256, accepted=26) == []  # 25.6 would be a tenth
    assert watched.verify(ENOUGH_VERIFICATIONS - 1, accepted=0) == []  # too early to tell
    (warning,) = watched.verify(1, accepted=1)
    assert f"of the last {ENOUGH_VERIFICATIONS} verifications 1 were accepted" in warning
    assert "vllm-dflash inspect D --target T" in warning
    assert watched.verify(ENOUGH_VERIFICATIONS, accepted=0) == []  # it comes once


def test_many_requests_that_are_rejected_at_once() -> None:
    """Requests with the same prompt write the same, so a step of many tells no more than one."""
    watched = Watched()
    for accepted in (0, ENOUGH_VERIFICATIONS):
        watched.statistics.verifications += ENOUGH_VERIFICATIONS
        watched.statistics.accepted_tokens += accepted
        assert watched.look() == []
    assert watched.verify(0, accepted=0) == []


@pytest.mark.parametrize(("declared", "other"), [(False, "true"), (True, "false")])
def test_the_other_row_of_first_drafts_is_named_with_what_to_write(
    declared: bool, other: str
) -> None:
    nested = {"sample_from_anchor": declared}
    (warning,) = Watched(dflash_config=nested).verify(ENOUGH_VERIFICATIONS, accepted=0)
    assert f"sample_from_anchor, which is {str(declared).lower()} by it" in warning
    written = warning.partition("--speculative-config '")[2].partition(", ...}'")[0] + "}"
    overrides = {"dflash_config": {"sample_from_anchor": json.loads(other)}}
    assert json.loads(written) == {"drafter_overrides": overrides}
    config = drafter_config(dflash_config=nested)
    assert parse_overridden("D", config, overrides).sample_from_anchor is not declared
    (warning,) = Watched(**lilicorr_config()).verify(ENOUGH_VERIFICATIONS, accepted=0)
    assert "sample_from_anchor" not in warning  # it can have only one


def test_free_drafts_say_nothing_about_the_drafter() -> None:
    watched = Watched()
    assert watched.verify_free(10_000, accepted=0) == []
    assert watched.verify(ENOUGH_VERIFICATIONS - 1, accepted=0) == []
    assert watched.verify_free(10_000, accepted=90_000) == []
    (warning,) = watched.verify(1, accepted=1)
    assert f"of the last {ENOUGH_VERIFICATIONS} verifications 1 were accepted" in warning
