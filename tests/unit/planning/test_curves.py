"""Curves of costs."""

from __future__ import annotations

import numpy as np
import pytest

from support.planner_world import curve


def test_a_curve_interpolates_and_goes_on_with_its_last_slope() -> None:
    line = curve({1: 10.0, 3: 20.0, 5: 40.0})
    assert line.at(np.array([1, 2, 3, 4, 7])) * 1000 == pytest.approx([10, 15, 20, 30, 60])


def test_a_single_point_is_a_flat_curve() -> None:
    """As with K = 1 and one request at a time."""
    line = curve({2: 10.0})
    assert line.at(np.array([1, 2, 9])) * 1000 == pytest.approx([10, 10, 10])


def test_a_profile_that_dips_is_made_non_decreasing() -> None:
    assert curve({1: 10.0, 2: 9.0, 4: 12.0}).at(np.array([1, 2, 4])) * 1000 == pytest.approx(
        [10, 10, 12]
    )
