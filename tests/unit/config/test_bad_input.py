"""Bad input stops with a clear message before any engine process starts.

`create_engine_config` is what both `LLM(...)` and `vllm serve` call before starting anything.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from support.drafter_harness import DrafterHarness
from support.pairs import as_speculators, drafter_config, make_pair
from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.config import pair as pair_check


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (drafter_config(head_dim=12), "head_dim is 12: vLLM's CPU kernels need a multiple of 8"),
        (
            drafter_config(hidden_size=60, target_hidden_size=64),
            "hidden_size is 60: vLLM's CPU kernels need a multiple of 8",
        ),
        (
            {**as_speculators(drafter_config()), "speculators_config": None},
            "has speculators_model_type but no speculators_config, by which vLLM recognises",
        ),
    ],
)
def test_a_config_that_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    pair = make_pair(tmp_path)
    (pair.drafter / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError) as refused:
        pair.start()
    assert message in str(refused.value)


def test_integers_from_a_hub_are_refused_while_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its headers were not read before."""
    pair = make_pair(tmp_path)
    tensors = load_file(pair.drafter / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].char()
    save_file(tensors, pair.drafter / "model.safetensors")
    monkeypatch.setattr(pair_check, "check_tensors", lambda *_: None)
    with pytest.raises(DrafterError, match=r"fc\.weight is stored as int8"):
        DrafterHarness(pair)
