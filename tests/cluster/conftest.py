"""A plain engine in the test process; engines that Ray starts are compared with it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from vllm import LLM

from support.engines import TARGET, engine

# Ray Serve gives its proxy a few seconds to answer: too few where two cores also run other tests.
for name in ("READY_CHECK_TIMEOUT_S", "HEALTH_CHECK_TIMEOUT_S", "GRACEFUL_SHUTDOWN_TIMEOUT_S"):
    os.environ.setdefault(f"RAY_SERVE_PROXY_{name}", "60")


@pytest.fixture(scope="session")
def plain() -> Iterator[LLM]:
    """Plain decoding."""
    with engine(model=str(TARGET)) as llm:
        yield llm
