"""Which steps get a new plan."""

import pytest

from vllm_dflash.engine.cadence import MOST_STEPS, SOON, Cadence


def due(cadence: Cadence, count: int, num_requests: int = 8) -> list[int]:
    """Numbers of the steps that are due, out of the first `count`."""
    return [number for number in range(count) if cadence.is_due(num_requests)]


def test_until_times_are_known_all_are() -> None:
    assert due(Cadence(), 5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("planning", "step", "every"),
    [(1e-3, 1.0, 1), (1e-3, 0.05, 2), (1e-3, 0.01, 10), (1e-3, 1e-3, MOST_STEPS)],
)
def test_planning_takes_a_hundredth_of_the_time(planning: float, step: float, every: int) -> None:
    cadence = Cadence()
    for _ in range(3):
        cadence.record_times(planning, step)
    assert due(cadence, 2 * every + 1) == [0, every, 2 * every]


def test_mean_times_follow() -> None:
    cadence = Cadence()
    cadence.record_times(1e-3, 1.0)
    for _ in range(40):
        cadence.record_times(1e-3, 0.0)  # after a pause, which has no time
        cadence.record_times(1e-3, 0.01)
    assert due(cadence, 21) == [0, 10, 20]


def test_a_batch_of_another_size_is_planned_at_once() -> None:
    cadence = Cadence()
    cadence.record_times(1e-3, 0.01)
    counts = [32, 32, 31, 28, 27, 27, 1, 2, 0, 1]
    assert [cadence.is_due(count) for count in counts] == [
        *(True, False, False, False, True, False, True, True, True, True)
    ]


def test_what_a_probe_shows_is_not_missed() -> None:
    """Its outcome comes two steps later."""
    cadence = Cadence()
    cadence.record_times(1e-3, 0.01)
    assert cadence.is_due(8)
    cadence.watch()
    assert due(cadence, SOON + 10) == [*range(SOON), SOON - 1 + 10]


def test_steps_that_pass_count_once() -> None:
    """Whether they were planned or not: what probes may cost grows with them."""
    cadence = Cadence()
    cadence.record_times(1e-3, 0.01)
    passed = []
    for number in range(25):
        if cadence.is_due(8):
            passed.append(cadence.take_steps_since_plan())
        if number == 10:
            cadence.watch()
    assert passed == [1, 10, 1, 1, 1, 1, 10]
    assert sum(passed) == 25
