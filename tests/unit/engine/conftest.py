"""Fixtures of the tests of both profiles."""

from __future__ import annotations

import pytest

from support.fake_time import FakeTime
from vllm_dflash.engine import profile


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """Replace the profile's clock, on a machine with one rank."""
    time = FakeTime()
    monkeypatch.setattr(profile, "time", time)
    monkeypatch.setattr(profile, "from_rank_0", lambda seconds: seconds)
    return time
