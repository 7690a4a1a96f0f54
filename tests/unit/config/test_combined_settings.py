"""What `tests/engine/test_combinations.py` combines, and what it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from support.combined_settings import EXCLUDED, engine_settings, speculative_config
from support.engines import TARGET
from support.pairwise import Pair


@pytest.mark.parametrize(
    "excluded", EXCLUDED, ids=lambda two: " + ".join(map(" ".join, sorted(two)))
)
def test_what_is_left_out_is_refused(excluded: Pair, tmp_path: Path) -> None:
    combination = dict(excluded)
    arguments: dict[str, Any] = engine_settings(combination)
    arguments |= {"speculative_config": speculative_config(combination, tmp_path)}
    with pytest.raises(ValueError, match=EXCLUDED[excluded]):
        EngineArgs(model=str(TARGET), **arguments).create_engine_config()
