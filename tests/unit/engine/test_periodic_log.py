"""The line in the log: when it comes, and that it covers only what is new."""

import pytest

from support.log_lines import log_lines
from vllm_dflash.engine.reporting.log import PeriodicLog
from vllm_dflash.engine.reporting.statistics import DraftStatistics


class Logged:
    """A log with a clock of its own, ten seconds a line."""

    def __init__(self) -> None:
        self.now = 100.0
        self.statistics = DraftStatistics(3)
        self.log = PeriodicLog(self.statistics, 10.0, lambda: self.now)

    def at(self, now: float) -> list[str]:
        """Lines that come at this time."""
        self.now = now
        with log_lines() as lines:
            self.log.tick()
        return [line.removeprefix("INFO ") for line in lines]

    def count(self, **numbers: float) -> None:
        """So much more of each; the first three are of steps."""
        self.statistics.costs[0] += [
            numbers.pop(name, 0) for name in ("timed", "estimated", "measured")
        ]
        for name, more in numbers.items():
            setattr(self.statistics, name, getattr(self.statistics, name) + more)


@pytest.fixture
def logged() -> Logged:
    return Logged()


A_STEP = {
    "drafted_steps": 1,
    "skipped_steps": 3,
    "verifications": 2,
    "draft_tokens": 5,
    "free_draft_tokens": 2,
    "accepted_tokens": 3,
    "timed": 2,
    "estimated": 0.06,
    "measured": 0.08,
    "produced_tokens": 5,
    "plain_tokens": 4,
    "expected_tokens": 7,
}
LINE = (
    "DFlash planner: Drafted steps: 25%, Mean draft length: 2.50 (free: 40% of the drafts), Mean"
    " acceptance length: 2.50, Step: 40.0 ms (estimated 30.0 ms), Estimated gain over plain"
    " decoding, by the cost model: 1.25x (planned: 1.75x)"
)


def test_one_line_per_interval(logged: Logged) -> None:
    logged.count(**A_STEP)
    assert logged.at(109.9) == []
    assert logged.at(110.0) == [LINE]
    logged.count(**A_STEP)
    assert logged.at(119.9) == []
    assert logged.at(123.0) == [LINE]  # of the new step alone
    logged.count(**A_STEP)
    assert logged.at(132.9) == []  # ten seconds after the last line, not after its time
    assert logged.at(133.0) == [LINE]


@pytest.mark.parametrize(
    "nothing",
    [
        {},
        A_STEP | {"drafted_steps": 0, "skipped_steps": 0},
        A_STEP | {"timed": 0},
    ],
    ids=["nothing happened", "nobody could draft", "no step was timed"],
)
def test_no_line_where_there_is_nothing_to_say(logged: Logged, nothing: dict[str, float]) -> None:
    logged.count(**nothing)
    assert logged.at(111.0) == []
    logged.count(**A_STEP)
    assert logged.at(120.9) == []  # the next look is due all the same
    assert logged.at(121.0) == [LINE]


def test_undrafted_steps_have_a_line_too(logged: Logged) -> None:
    logged.count(skipped_steps=1, timed=1, estimated=0.01, measured=0.02)
    assert logged.at(110.0) == [
        "DFlash planner: Drafted steps: 0%, Mean draft length: 0.00 (free: 0% of the drafts), Mean"
        " acceptance length: 1.00, Step: 20.0 ms (estimated 10.0 ms), Estimated gain over plain"
        " decoding, by the cost model: 0.00x (planned: 0.00x)"
    ]
