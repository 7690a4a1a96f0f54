"""Fixtures of the tests of both profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.fake_time import FakeTime


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """Replace the profile's clock, on a machine with one rank."""
    from support.fake_time import FakeTime
    from vllm_dflash.engine import profile  # not before the runner is chosen

    time = FakeTime()
    monkeypatch.setattr(profile, "time", time)
    monkeypatch.setattr(profile, "from_rank_0", lambda seconds: seconds)
    return time
