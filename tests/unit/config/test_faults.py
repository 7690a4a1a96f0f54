"""Broken drafter files give a clear message, in bounded time, before anything starts.

See test_config_fuzz.py for the config's fields in general, test_messages.py for other refusals, and
test_many_clients.py for a killed one.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from support.drafter_harness import DrafterHarness
from support.pairs import Pair, drafter_config, make_pair
from vllm_dflash.checkpoint.spec import DrafterError


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path / "pair")


def refusal(pair: Pair) -> str:
    with pytest.raises(DrafterError) as refused:
        pair.start()
    return str(refused.value)


def test_integers_from_a_hub_are_refused_while_loading(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its headers were not read before."""
    tensors = load_file(pair.drafter / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].char()
    save_file(tensors, pair.drafter / "model.safetensors")
    monkeypatch.setattr("vllm_dflash.config.pair.check_tensors", lambda *_: None)
    with pytest.raises(DrafterError, match=r"fc\.weight is stored as int8"):
        DrafterHarness(pair)


# Field, value, what the message must hold.
HUGE: list[tuple[str, Any, str]] = [
    ("hidden_size", 2**63, "hidden_size must be an integer"),
    ("num_hidden_layers", 1024, "layers.1000."),
    ("num_attention_heads", 10**9, "q_proj"),
    ("vocab_size", 10**9, "vocab_size is 1000000000 in the drafter"),
    ("draft_vocab_size", 10**9, "d2t [1000000000]"),
    ("rope_parameters", {"rope_type": "yarn", "factor": 1e12}, "factor of rope_parameters"),
    ("rope_parameters", {"rope_type": "linear", "factor": float("inf")}, "factor of"),
    ("rope_parameters", {"rope_theta": float("nan")}, "rope_theta of rope_parameters"),
    ("layer_types", ["full_attention"] * 10**5, "layer_types names 100000 layers"),
    ("layer_types", "x" * 10**6, "layer_types must be a list"),
    ("dflash_config", {"target_layer_ids": list(range(10**5))}, "a list of 1 to 1024 layer"),
    ("dflash_config", {"use_swa": True, "swa_window_size": 10**12}, "swa_window_size"),
]


def test_huge_numbers_are_refused_by_name_and_at_once(pair: Pair) -> None:
    """In little time and memory, and in messages of a readable length."""
    pair.start()  # imports everything first
    before = psutil.Process().memory_info().rss
    for field, value, expected in HUGE:
        config = drafter_config(**{field: value})
        (pair.drafter / "config.json").write_text(json.dumps(config))
        began = time.process_time()
        message = refusal(pair)
        assert time.process_time() - began < 20, field  # not in proportion to the number
        assert expected in message, (field, message[:500])
        assert len(message) < 10_000, field
    assert psutil.Process().memory_info().rss - before < 200 << 20
