"""A short soak of a real server."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from soak.checks import Limits
from soak.soak_report import write_report
from soak.soak_run import Settings, soak
from support import DEMO
from support.waiting import PATIENCE_S

pytestmark = pytest.mark.server


def test_a_short_soak(tmp_path: Path) -> None:
    """All checks except those that need minutes: memory still fills, and seconds are noisy."""
    settings = Settings(
        pair=DEMO,
        prompts=DEMO / "held_out.jsonl",
        out=tmp_path,
        minutes=45 / 60,
        clients=8,
        max_rows=128,
        sample_every=1.0,
        arguments=("--enforce-eager",),
        limits=Limits(growth=math.inf, slowdown=math.inf, shutdown=PATIENCE_S),
    )
    soaked = soak(settings)
    write_report(soaked)
    assert soaked.held, [check for check in soaked.checks if not check.held]
    assert soaked.figures["accepted"] > 0
    assert soaked.figures["preemptions"] > 0
    for name in ("soak.json", "soak.md", "soak.png"):
        assert (tmp_path / name).stat().st_size > 500
