"""What tests of the benchmarks leave alone."""

from pathlib import Path

import pytest

from gpu import gpu_models


@pytest.fixture(autouse=True)
def _no_models_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's memory is for those who measure."""
    monkeypatch.setattr(gpu_models, "IN_MEMORY", tmp_path / "no-memory")
