"""Targets that cannot be drafted for are refused before any process starts."""

from pathlib import Path

import pytest

from support.engines import FIXED, engine
from support.pairs import drafter_config, save_drafter
from support.targets import write_config


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("Gemma2", r"gives no hidden states .* --model-impl transformers"),
    ],
    ids=["without taps"],
)
def test_refused_with_what_to_do_about_it(tmp_path: Path, family: str, message: str) -> None:
    write_config(tmp_path / "target", family)
    save_drafter(tmp_path / "drafter", drafter_config())
    speculative = {**FIXED, "model": str(tmp_path / "drafter")}
    with (
        pytest.raises(ValueError, match=message),
        engine(model=str(tmp_path / "target"), speculative_config=speculative),
    ):
        pass
