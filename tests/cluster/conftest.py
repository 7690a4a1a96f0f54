"""One engine of the tests' own process, which all that Ray starts is held against."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from vllm import LLM

from support.engines import TARGET, engine

# Ray Serve gives its proxy seconds to answer, which is little where two cores run other tests, too.
for name in ("READY_CHECK_TIMEOUT_S", "HEALTH_CHECK_TIMEOUT_S", "GRACEFUL_SHUTDOWN_TIMEOUT_S"):
    os.environ.setdefault(f"RAY_SERVE_PROXY_{name}", "60")


@pytest.fixture(scope="session")
def plain() -> Iterator[LLM]:
    """Plain decoding."""
    with engine(model=str(TARGET)) as llm:
        yield llm
