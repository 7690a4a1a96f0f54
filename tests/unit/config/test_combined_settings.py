"""What `tests/engine/test_combinations.py` combines, and what it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from support.combined_settings import (
    COMBINATIONS,
    EXCLUDED,
    SETTINGS,
    WITHOUT_MEANING,
    engine_settings,
    speculative_config,
)
from support.engines import TARGET
from support.pairwise import Pair, all_pairs, covering, pair, pairs_of

pytestmark = pytest.mark.usefixtures("runner")


def test_every_two_values_meet() -> None:
    met = set().union(*map(pairs_of, COMBINATIONS))
    left_out = {*EXCLUDED, *WITHOUT_MEANING} & all_pairs(SETTINGS)
    assert met == all_pairs(SETTINGS) - left_out
    assert all(list(one) == list(SETTINGS) for one in COMBINATIONS)
    assert len(COMBINATIONS) < 18


def test_what_cannot_be_covered_is_named() -> None:
    settings = {"a": ("1", "2"), "b": ("1", "2"), "c": ("1",)}
    forbidden = {pair(("b", each), ("c", "1")) for each in "12"}
    with pytest.raises(ValueError, match=r"no combination has .*'a'.*is not excluded"):
        covering(settings, forbidden)
    assert len(covering(settings)) == 4


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
@pytest.mark.parametrize(
    "excluded", EXCLUDED, ids=lambda two: " + ".join(map(" ".join, sorted(two)))
)
def test_what_is_left_out_is_refused(excluded: Pair, tmp_path: Path) -> None:
    combination = dict(excluded)
    arguments: dict[str, Any] = engine_settings(combination)
    arguments |= {"speculative_config": speculative_config(combination, tmp_path)}
    with pytest.raises(ValueError, match=EXCLUDED[excluded]):
        EngineArgs(model=str(TARGET), **arguments).create_engine_config()
