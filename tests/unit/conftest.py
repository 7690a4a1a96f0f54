"""What many unit tests share: a pair of models, and benchmarks that are not run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.pairs import Pair
    from vllm_dflash.tools.bench.bench_runs import Comparison


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return a tiny random pair, which no test changes."""
    from support.pairs import make_pair  # not before the runner is chosen

    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[Comparison]:
    """Record the benchmarks that are asked for; none is run."""
    from vllm_dflash.tools.bench.bench_runs import Comparison

    asked: list[Comparison] = []
    monkeypatch.setattr(Comparison, "run", lambda self: asked.append(self))
    return asked
