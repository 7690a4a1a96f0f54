"""The line in the log: when it comes, and that it covers only what is new."""

import pytest

from support.fake_time import FakeTime
from support.log_lines import log_lines
from vllm_dflash.engine.reporting import statistics
from vllm_dflash.engine.reporting.log import PeriodicLog
from vllm_dflash.engine.reporting.statistics import DraftStatistics


class Logged:
    """A log with a line every ten seconds."""

    def __init__(self, time: FakeTime) -> None:
        self.time, self.statistics = time, DraftStatistics(3)
        self.log = PeriodicLog(self.statistics, 10.0)

    def at(self, now: float) -> list[str]:
        """Lines that are logged at this time."""
        self.time.now = now
        with log_lines() as lines:
            self.log.tick()
        return [line.removeprefix("INFO ") for line in lines]

    def count(self, **numbers: float) -> None:
        """Add to these counters."""
        for name, more in numbers.items():
            setattr(self.statistics, name, getattr(self.statistics, name) + more)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Logged:
    monkeypatch.setattr(statistics, "time", time := FakeTime())
    return Logged(time)


STEPS = {
    "drafted_steps": 64,
    "skipped_steps": 192,
    "draft_tokens": 320,
    "free_draft_tokens": 128,
}
LINE = "DFlash planner: Drafted steps: 25%, Free drafts: 40%"


def test_one_line_per_interval(logged: Logged) -> None:
    logged.count(**STEPS)
    assert logged.at(109.9) == []
    assert logged.at(110.0) == [LINE]
    logged.count(**STEPS)
    assert logged.at(119.9) == []
    assert logged.at(123.0) == [LINE]  # only the new steps
    logged.count(**STEPS | {"draft_tokens": 0})
    assert logged.at(132.9) == []  # ten seconds after the last line, not after it was due
    (line,) = logged.at(133.0)
    assert line == "DFlash planner: Drafted steps: 25% (drafts do not pay at this load)"


def test_no_line_where_nobody_could_draft(logged: Logged) -> None:
    logged.count(**STEPS | {"drafted_steps": 0, "skipped_steps": 0})
    assert logged.at(111.0) == []


def test_a_line_that_is_due_comes_as_soon_as_there_is_something_to_say(logged: Logged) -> None:
    """An engine that was idle logs its line during its next request, not during the one after."""
    assert logged.at(400.0) == []
    few = {name: number // 8 for name, number in STEPS.items()}  # 32 steps
    logged.count(**few | {"skipped_steps": 23})
    assert logged.at(401.0) == []
    logged.count(skipped_steps=1)
    assert logged.at(401.1) == [LINE]
    logged.count(**STEPS)
    assert logged.at(420.0) == [LINE]
