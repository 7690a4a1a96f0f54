"""Curves of costs, and how measurements move them."""

from __future__ import annotations

import numpy as np
import pytest

from support.planner_world import curve
from vllm_dflash.planning.costs import Curve


def test_a_curve_interpolates_and_goes_on_with_its_last_slope() -> None:
    line = curve({1: 10.0, 3: 20.0, 5: 40.0})
    assert line.at(np.array([1, 2, 3, 4, 7])) * 1000 == pytest.approx([10, 15, 20, 30, 60])


def test_a_single_point_is_a_flat_curve() -> None:
    """As with K = 1 and one request at a time."""
    line = curve({2: 10.0})
    assert line.at(np.array([1, 2, 9])) * 1000 == pytest.approx([10, 10, 10])
    line.correct(2, 0.012)
    assert line.at(2) * 1000 == pytest.approx(11)


def test_a_profile_that_dips_is_made_non_decreasing() -> None:
    assert curve({1: 10.0, 2: 9.0, 4: 12.0}).at(np.array([1, 2, 4])) * 1000 == pytest.approx(
        [10, 10, 12]
    )


def settled(points: dict[int, float]) -> Curve:
    """Return a curve of which every point was measured often, as it is."""
    line = curve(points)
    for _ in range(50):
        for count, ms in points.items():
            line.correct(count, ms / 1000)
    return line


@pytest.mark.parametrize(
    ("count", "ms", "expected"),
    [
        # 20 ms were expected for 4 rows. 15% of the surprise there, 15% of that an octave away.
        (4, 24.0, [10.045, 10.045, 20.6, 40.18]),
        (4, 18.0, [9.9775, 9.9775, 19.7, 39.91]),
        # A surprise is limited to three tenths.
        (4, 26.0, [10.0675, 10.0675, 20.9, 40.27]),
        (4, 9000.0, [10.0675, 10.0675, 20.9, 40.27]),
        (4, 0.0, [9.9325, 9.9325, 19.1, 39.73]),
        # Half-way between two points, both get all of it: 2.83 rows, 14.14 ms, 30% more.
        (8**0.5, 18.38477631, [10.0675, 10.45, 20.9, 40.27]),
        # 3 rows, 15 ms: 4 is 0.17 octaves nearer than 2.
        (3, 18.0, [10.045, 10.249016, 20.6, 40.18]),
        # Beyond the end, the last point is the nearest.
        (16, 88.0, [10.0225, 10.0225, 20.045, 40.6]),
        # Less than half a row counts as half a row.
        (0, 11.0, [10.15, 10.15, 20.045, 40.09]),
    ],
)
def test_a_curve_moves_towards_a_measurement(
    count: float, ms: float, expected: list[float]
) -> None:
    line = settled({1: 10.0, 2: 10.0, 4: 20.0, 8: 40.0})
    line.correct(count, ms / 1000)
    assert line.seconds * 1000 == pytest.approx(expected, rel=1e-5)


def test_the_first_measurements_count_more() -> None:
    """The profile is worth one; near the point, the rest is their mean."""
    line = curve({1: 10.0, 4: 20.0})
    for expected in (11.0, 11.3333, 11.5, 11.6):
        line.correct(1, 0.012)
        assert line.at(1) * 1000 == pytest.approx(expected, rel=0.002)
    assert 20.2 < line.at(4) * 1000 < 21


def test_a_curve_never_comes_to_dip() -> None:
    line = curve({1: 10.0, 2: 10.0})
    line.correct(2, 0.005)
    assert line.seconds * 1000 == pytest.approx([10 - 3 * 0.15 / 1.15] * 2)


@pytest.mark.parametrize("points", [{0: 0.0, 4: 0.0}, {0: 0.0, 4: 8.0}])
def test_what_takes_no_time_cannot_be_wrong_by_a_share_of_it(points: dict[int, float]) -> None:
    line = curve(points)
    line.correct(0, 1.0)
    assert line.seconds * 1000 == pytest.approx(list(points.values()))


def test_a_count_of_zero_is_an_octave_from_one() -> None:
    line = settled({0: 10.0, 1: 20.0})
    line.correct(1, 0.022)
    assert line.seconds * 1000 == pytest.approx([10.0225, 20.3])
