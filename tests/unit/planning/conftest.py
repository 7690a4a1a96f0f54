"""Time of simulated engines: what they plan does not depend on how fast this machine plans it."""

import pytest

from support.fake_time import FakeTime
from vllm_dflash.planning import step


@pytest.fixture(autouse=True)
def planning_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise how often V2's simulated scheduler plans would depend on it."""
    monkeypatch.setattr(step, "time", FakeTime())
