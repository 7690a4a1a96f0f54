"""LoRA adapters of the target: its own text for each request, with drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm import LLM
from vllm.lora.request import LoRARequest

from support.engines import (
    DFLASH,
    TARGET,
    USES_V2,
    engine,
    fix_costs,
    greedy,
    held_out_prompts,
    proposer_of,
    target_of,
)

pytestmark = pytest.mark.usefixtures("runner")
PROMPTS = held_out_prompts(4)
PARAMS = greedy(24, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
}


def make_adapter(folder: Path, seed: int) -> LoRARequest:
    """One that changes every text: of two projections of each layer, and of the head.

    But on V2, where vLLM 0.32 gives an adapter of the head one row of each request, however many
    are verified.
    """
    shape = json.loads((TARGET / "config.json").read_text())
    hidden, generator = shape["hidden_size"], torch.Generator().manual_seed(seed)
    sizes = {} if USES_V2 else {"lm_head": shape["vocab_size"]}
    for layer in range(shape["num_hidden_layers"]):
        for name, heads in (("q", "num_attention_heads"), ("v", "num_key_value_heads")):
            outputs = shape[heads] * shape["head_dim"]
            sizes[f"model.layers.{layer}.self_attn.{name}_proj"] = outputs
    tensors = {}
    for name, outputs in sizes.items():
        for part, of in (("A", (8, hidden)), ("B", (outputs, 8))):
            weight = torch.randn(of, generator=generator) * 0.1
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = weight
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "bias": "none"}
    config["target_modules"] = sorted({name.rpartition(".")[2] for name in sizes})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(folder.name, seed, str(folder))


def texts(llm: LLM, adapters: list[LoRARequest | None]) -> list[list[int]]:
    """Of a batch in which each prompt has each adapter."""
    given = [(prompt, adapter) for prompt in PROMPTS for adapter in adapters]
    outputs = llm.generate(
        [prompt for prompt, _ in given],
        PARAMS,
        lora_request=[adapter for _, adapter in given],
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_each_request_gets_its_adapters_own_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = [None, make_adapter(tmp_path / "one", 1), make_adapter(tmp_path / "two", 2)]
    with engine(**SETTINGS) as llm:
        plain = texts(llm, adapters)
    assert all(plain[i] != plain[i + 1] != plain[i + 2] for i in range(0, len(plain), 3))
    fix_costs(monkeypatch)
    with engine(speculative_config=dict(DFLASH), **SETTINGS) as llm:
        assert texts(llm, adapters) == plain
        (before,) = llm.collective_rpc("dflash_stats")
        assert texts(llm, [None]) == plain[::3]
        (stats,) = llm.collective_rpc("dflash_stats")
        # Last was none: block drafts are the unadapted target's head, whatever the others had.
        texts(llm, adapters[1:])
        hidden, target = torch.randn(5, target_of(llm).config.hidden_size), target_of(llm)
        expected = hidden @ target.lm_head.weight.T
        found = proposer_of(llm).model.compute_logits(hidden)
        assert (found - expected[:, : found.shape[1]]).abs().max() < 1e-4
    accepted = stats["accepted_tokens"] - before["accepted_tokens"]
    free = stats["free_accepted_tokens"] - before["free_accepted_tokens"]
    assert accepted - free > 10
    assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0
