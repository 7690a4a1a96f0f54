"""Fixtures for the tests of the benchmarks."""

from pathlib import Path

import pytest

from gpu import gpu_models


@pytest.fixture(autouse=True)
def _no_models_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no models in the machine's memory, which measurements need."""
    monkeypatch.setattr(gpu_models, "IN_MEMORY", tmp_path / "no-memory")
