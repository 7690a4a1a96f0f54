"""Warnings of drafts that are not finite, or never accepted: once, and with what to do."""

from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.reporting.watch import (
    ENOUGH_VERIFICATIONS,
    FIRST_LOOK,
    LONGEST_INTERVAL,
    DraftWatch,
)


class Watched:
    def __init__(self) -> None:
        self.statistics = DraftStatistics(max_draft=7)
        self.warnings: list[str] = []
        self.watch = DraftWatch(
            lambda: self.statistics,
            lambda text, *values: self.warnings.append(text % values),
            target="T",
            drafter="D",
        )

    def verify(self, times: int, accepted: int) -> None:
        self.statistics.verifications += times
        self.statistics.accepted_tokens += accepted
        self.watch.look()

    def verify_free(self, times: int, accepted: int) -> None:
        """Drafts that texts predicted."""
        self.statistics.free_verifications += times
        self.statistics.free_accepted_tokens += accepted
        self.verify(times, accepted)


def test_drafts_that_are_not_finite() -> None:
    watched = Watched()
    watched.watch.look()
    assert watched.warnings == []
    watched.statistics.nan_drafts = 3
    for _ in range(2 * FIRST_LOOK):
        watched.watch.tick()
    (warning,) = watched.warnings
    assert "logits of 3 drafts were not finite" in warning
    assert "vllm-dflash parity D --target T" in warning


def test_looks_become_rare() -> None:
    """Each waits for the device."""
    watched, looks = Watched(), []
    watched.watch.look = lambda: looks.append(step)
    for step in range(1, 10 * LONGEST_INTERVAL):  # noqa: B007 - the lambda reads it
        watched.watch.tick()
    assert looks[:3] == [FIRST_LOOK, 3 * FIRST_LOOK, 7 * FIRST_LOOK]
    assert looks[-1] - looks[-2] == LONGEST_INTERVAL
    assert len(looks) < 20


def test_acceptance_stuck_at_zero() -> None:
    watched = Watched()
    watched.verify(ENOUGH_VERIFICATIONS - 1, accepted=0)
    assert watched.warnings == []  # too early to tell
    watched.verify(1, accepted=1)
    watched.verify(ENOUGH_VERIFICATIONS, accepted=0)
    (warning,) = watched.warnings
    assert f"of the last {ENOUGH_VERIFICATIONS} verifications 1 were accepted" in warning
    assert "another target" in warning
    assert "thinking mode" in warning
    assert "vllm-dflash parity D --target T" in warning


def test_acceptance_that_stops_after_a_good_start() -> None:
    watched = Watched()
    watched.verify(10_000, accepted=20_000)
    assert watched.warnings == []
    watched.verify(ENOUGH_VERIFICATIONS, accepted=0)
    assert len(watched.warnings) == 1


def test_a_hundredth_is_little_but_something() -> None:
    watched = Watched()
    watched.verify(256, accepted=3)  # 2.56 would be a hundredth
    assert watched.warnings == []
    watched.verify(256, accepted=2)
    assert len(watched.warnings) == 1


def test_free_drafts_say_nothing_about_the_drafter() -> None:
    watched = Watched()
    watched.verify_free(10_000, accepted=0)
    assert watched.warnings == []
    watched.verify(ENOUGH_VERIFICATIONS - 1, accepted=0)
    watched.verify_free(10_000, accepted=90_000)
    assert watched.warnings == []
    watched.verify(1, accepted=1)
    (warning,) = watched.warnings
    assert f"of the last {ENOUGH_VERIFICATIONS} verifications 1 were accepted" in warning


def test_each_warning_comes_once_and_then_nobody_looks() -> None:
    """Looking waits for the device."""
    watched = Watched()
    for _ in range(3):
        watched.verify(ENOUGH_VERIFICATIONS, accepted=0)
    assert len(watched.warnings) == 1
    watched.statistics.nan_drafts = 1
    for _ in range(FIRST_LOOK):
        watched.watch.tick()
    assert len(watched.warnings) == 2
    watched.watch.look = lambda: watched.warnings.append("looked")
    for _ in range(4 * LONGEST_INTERVAL):
        watched.watch.tick()
    assert len(watched.warnings) == 2
