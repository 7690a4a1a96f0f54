"""Compare what `vllm-dflash inspect` says about memory with real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.engines import DRAFTER, FIXED, TARGET, drafter_cache_per_token, engine
from support.pairs import dflash2_config, lilicorr_config, make_pair
from support.quantised import quantise
from vllm_dflash.model.draft_model import DFlashDraftModel
from vllm_dflash.tools.inspect.inspect_pair import inspect_pair

MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}


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


SHAPES: dict[str, dict[str, Any]] = {
    # Pages half as large again as the target's; rows of the vocabulary are padded.
    "biases, sinks and a vocabulary of its own": {
        **MIXED,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "attention_bias": True,
        "attention_sink_bias": True,
        "target_hidden_size": 64,
        "hidden_size": 96,
        "draft_vocab_size": 100,
    },
    "lilicorr": lilicorr_config(dflash_config={"conv_kernel_size": 3, "conv_group_size": 8}),
    "dflash2": dflash2_config(),
}
RARE = ("the demo pair", "int8", "dflash2")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in RARE else [])
        for kind in ("the demo pair", "int8", "int4", *SHAPES)
    ],
)
def test_a_drafters_memory(tmp_path: Path, kind: str, loaded: dict[str, int]) -> None:
    """Pages of another size than the target's share its cache group. Quantised weights are as large
    as in the file, and have no copy for the context."""
    target, drafter, more = TARGET, DRAFTER, dict[str, Any]()
    is_quantised = kind in ("int8", "int4")
    if is_quantised:
        drafter = tmp_path / "it"
        quantise(DRAFTER, drafter, kind)
    elif kind in SHAPES:
        pair = make_pair(tmp_path, **SHAPES[kind])
        target, drafter, more = pair.target, pair.drafter, {"skip_tokenizer_init": True}
    dtype = "bfloat16" if is_quantised else "float32"
    settings: dict[str, Any] = {"dtype": dtype, "max_model_len": 512}
    found = inspect_pair(str(drafter), str(target), **settings)
    assert found.exit_code == 0, found.to_dict()
    assert found.memory is not None
    drafts = {**FIXED, "model": str(drafter)}
    with engine(model=str(target), speculative_config=drafts, **settings, **more) as llm:
        assert found.memory.drafter_cache_per_token == drafter_cache_per_token(llm)
    # For quantised layers that are merged here, vLLM keeps a single `weight_shape`, of 16 bytes.
    weights = pytest.approx(sum(loaded.values()), rel=2e-4 if is_quantised else 0)
    assert found.memory.drafter_weights == weights
