"""Compare what `vllm-dflash inspect` says about memory with real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.engines import DRAFTER, FIXED, TARGET, drafter_cache_per_token, engine
from support.pairs import (
    dflash2_config,
    lilicorr_config,
    make_pair,
)
from support.quantised import quantise
from vllm_dflash.model.draft_model import DFlashDraftModel
from vllm_dflash.tools.inspect.inspect_pair import inspect_pair
from vllm_dflash.tools.inspect.inspection import MemoryFacts

MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3}
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512}
"""The settings of `engine`."""


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of each parameter of the draft model when it is loaded.

    Later, vLLM's CPU kernels remove most of them and keep packed copies.
    """
    sizes: dict[str, int] = {}
    load = DFlashDraftModel.load_weights

    def load_weights(self: DFlashDraftModel, weights: Any) -> set[str]:
        names = load(self, weights)
        sizes.update((name, p.numel() * p.element_size()) for name, p in self.named_parameters())
        context = self.context
        stacked = (context.kv_weight, context.kv_bias, context.k_norm_weight)
        tensors = [tensor for tensor in stacked if tensor is not None]
        sizes["stacked"] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return names

    monkeypatch.setattr(DFlashDraftModel, "load_weights", load_weights)
    return sizes


def memory_of(drafter: Path, target: Path, options: dict[str, Any] = OPTIONS) -> MemoryFacts:
    found = inspect_pair(str(drafter), str(target), **options)
    assert found.exit_code == 0, found.to_dict()
    assert found.memory is not None
    return found.memory


def drafting(drafter: Path, **settings: Any) -> Any:
    return engine(speculative_config={**FIXED, "model": str(drafter)}, **settings)


def check_weights(memory: MemoryFacts, loaded: dict[str, int]) -> None:
    assert memory.drafter_weights == sum(loaded.values())


def test_the_demo_pair(loaded: dict[str, int]) -> None:
    memory = memory_of(DRAFTER, TARGET)
    with drafting(DRAFTER) as llm:
        assert memory.drafter_cache_per_token == drafter_cache_per_token(llm)
    check_weights(memory, loaded)


@pytest.mark.parametrize(
    "changes",
    [
        # Pages twice as large as the target's.
        {**MIXED, "num_key_value_heads": 4, "attention_bias": True, "attention_sink_bias": True},
        # Half as large again; rows of the vocabulary are padded.
        {**THREE_HEADS, "target_hidden_size": 64, "hidden_size": 96, "draft_vocab_size": 100},
        dflash2_config(),
        lilicorr_config(),
    ],
    ids=["biases and sinks", "a vocabulary of its own", "dflash2", "lilicorr"],
)
def test_other_shapes(tmp_path: Path, changes: dict[str, Any], loaded: dict[str, int]) -> None:
    """Pages of another size than the target's share its cache group."""
    pair = make_pair(tmp_path, **changes)
    memory = memory_of(pair.drafter, pair.target)
    with drafting(pair.drafter, model=str(pair.target), skip_tokenizer_init=True) as llm:
        assert memory.drafter_cache_per_token == drafter_cache_per_token(llm)
    check_weights(memory, loaded)


@pytest.mark.parametrize("way", ["int8", "int4"])
def test_quantised_weights(tmp_path: Path, way: str, loaded: dict[str, int]) -> None:
    """They are as large as in the file, and have no copy for the context."""
    quantise(DRAFTER, tmp_path / "it", way)
    options = {**OPTIONS, "dtype": "bfloat16"}
    memory = memory_of(tmp_path / "it", TARGET, options)
    with drafting(tmp_path / "it", dtype="bfloat16") as llm:
        assert memory.drafter_cache_per_token == drafter_cache_per_token(llm)
    # For layers that are merged here, vLLM keeps a single `weight_shape`, of 16 bytes.
    assert memory.drafter_weights == pytest.approx(sum(loaded.values()), rel=2e-4)
