"""LoRA adapters of the target: each request gets its adapter's own text, with drafts."""

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
    slow_on_v2,
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
    # Otherwise the head is wrapped, too, and vLLM's V2 maps one row of each request to its adapter.
    **({"lora_target_modules": ["q_proj", "v_proj"]} if USES_V2 else {}),
}


def make_adapter(folder: Path, seed: int) -> LoRARequest:
    """Make an adapter of two projections in each layer that changes every text."""
    shape = json.loads((TARGET / "config.json").read_text())
    hidden, generator = shape["hidden_size"], torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, heads in (("q", "num_attention_heads"), ("v", "num_key_value_heads")):
            outputs = shape[heads] * shape["head_dim"]
            for part, of in (("A", (8, hidden)), ("B", (outputs, 8))):
                weight = torch.randn(of, generator=generator) * 0.1
                path = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
                tensors[f"{path}.lora_{part}.weight"] = weight
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "bias": "none"}
    config["target_modules"] = ["q_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(folder.name, seed, str(folder))


def texts(llm: LLM, adapters: list[LoRARequest | None]) -> list[list[list[int]]]:
    """Return texts by adapter, from a batch of each prompt with each adapter."""
    outputs = llm.generate(
        [prompt for _ in adapters for prompt in PROMPTS],
        PARAMS,
        lora_request=[adapter for adapter in adapters for _ in PROMPTS],
        use_tqdm=False,
    )
    written = [list(output.outputs[0].token_ids) for output in outputs]
    return [written[i : i + len(PROMPTS)] for i in range(0, len(written), len(PROMPTS))]


@slow_on_v2
def test_each_request_gets_its_adapters_own_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests without an adapter have their own batch: beside others, vLLM's CPU kernels give them
    the last adapter, in a plain engine as well."""
    adapters: list[Any] = [make_adapter(tmp_path / str(seed), seed) for seed in (1, 2)]
    with engine(**SETTINGS) as llm:
        plain = [texts(llm, [one])[0] for one in (*adapters, None)]
    assert all(a != b != c != a for a, b, c in zip(*plain, strict=True))
    fix_costs(monkeypatch)
    with engine(speculative_config=dict(DFLASH), **SETTINGS) as llm:
        assert texts(llm, adapters) == plain[:2]
        (before,) = llm.collective_rpc("dflash_stats")
        assert texts(llm, [None]) == plain[2:]
        (stats,) = llm.collective_rpc("dflash_stats")
        assert texts(llm, adapters[::-1]) == plain[1::-1]
        # Blocks use the target's head as it is, whichever adapters were used before.
        target = target_of(llm)
        hidden = torch.randn(5, target.config.hidden_size)
        found = proposer_of(llm).model.compute_logits(hidden)
        expected = hidden @ target.lm_head.weight.T
        assert (found - expected[:, : found.shape[1]]).abs().max() < 1e-4
    accepted = stats["accepted_tokens"] - before["accepted_tokens"]
    free = stats["free_accepted_tokens"] - before["free_accepted_tokens"]
    assert accepted - free > 10
    assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0
