"""The line that says which DFlash runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from support.log_lines import log_lines
from support.pairs import make_pair
from vllm_dflash import __version__
from vllm_dflash.config.options import DFlashOptions
from vllm_dflash.engine.log import log_active


@pytest.mark.parametrize(
    ("draft_length", "said"), [("adaptive", "up to 5 tokens"), ("fixed", "5 tokens")]
)
def test_the_start_line_names_drafter_and_draft_length(
    tmp_path: Path, draft_length: str, said: str
) -> None:
    spec = dataclasses.replace(make_pair(tmp_path).spec, model="someone/its-drafter")
    with log_lines() as lines:
        log_active(DFlashOptions(5, draft_length, spec), "v1")
    assert lines == [
        f"INFO vllm-dflash {__version__} is active: drafter someone/its-drafter, draft length"
        f" {draft_length} ({said} a step), runner v1, block size 8, taps [0, 2]"
    ]
