"""Targets that cannot be drafted for are refused before any process starts."""

from pathlib import Path

import pytest
from engines import FIXED, engine
from pairs import drafter_config, save_drafter
from targets import write_config


def test_a_target_without_taps_is_refused(tmp_path: Path) -> None:
    """Before any process starts, with what to do about it."""
    write_config(tmp_path / "target", "Gemma2")
    save_drafter(tmp_path / "drafter", drafter_config())
    speculative = {**FIXED, "model": str(tmp_path / "drafter")}
    with (
        pytest.raises(ValueError, match=r"gives no hidden states .* --model-impl transformers"),
        engine(model=str(tmp_path / "target"), speculative_config=speculative),
    ):
        pass


def test_a_hybrid_target_is_refused_on_cpus(tmp_path: Path) -> None:
    """vLLM's CPU kernels misplace its state after each draft that is shorter than K."""
    write_config(tmp_path / "target", "Qwen3Next")
    save_drafter(tmp_path / "drafter", drafter_config())
    speculative = {**FIXED, "model": str(tmp_path / "drafter")}
    with (
        pytest.raises(ValueError, match=r"linear attention.* needs CUDA"),
        engine(model=str(tmp_path / "target"), speculative_config=speculative),
    ):
        pass
