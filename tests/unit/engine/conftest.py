"""Fixtures of several tests: the clock of profiles, and V2's schedulers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


@pytest.fixture(params=["asynchronous", "synchronous"])
def scheduler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return either of V2's schedulers, without vLLM's."""
    from support.bare_scheduler import bare
    from vllm_dflash.engine.v2.v2_scheduler import V2AsyncScheduler, V2Scheduler

    kinds = {"asynchronous": V2AsyncScheduler, "synchronous": V2Scheduler}
    return bare(monkeypatch, kinds[request.param])
