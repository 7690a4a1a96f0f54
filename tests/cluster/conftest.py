"""One engine of the tests' own process, which all that Ray starts is held against."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm import LLM

from support.engines import TARGET, engine


@pytest.fixture(scope="session")
def plain() -> Iterator[LLM]:
    """Plain decoding."""
    with engine(model=str(TARGET)) as llm:
        yield llm
