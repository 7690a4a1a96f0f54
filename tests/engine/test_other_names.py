"""Checkpoints that vLLM's own DFlash takes, by other names than the published ones: ours accepts as
many drafts of them as of the demo drafter (docs/checkpoints.md says what vLLM takes)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.engines import DRAFTER, FIXED, engine, greedy, held_out_prompts, slow_on_v2, token_ids

pytestmark = pytest.mark.usefixtures("runner")
PROMPTS, PARAMS = held_out_prompts(3), greedy(24)
Tensors = dict[str, torch.Tensor]


def renamed(tensors: Tensors) -> None:
    """A first layer, a context norm and a projection by names of EAGLE and Muse Glimmer."""
    for name in [*tensors]:
        other = name.replace("layers.0.", "midlayer.").replace("fc.", "encoder.fc.")
        other = other.replace("hidden_norm.", "encoder.output_norm_enc.")
        tensors[f"model.{other}"] = tensors.pop(name)


def fused(tensors: Tensors) -> None:
    """Projections as in the model."""
    for layer in (f"layers.{number}." for number in range(3)):
        for whole, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            room = whole.partition(".")[0]
            each = [tensors.pop(f"{layer}{room}.{part}_proj.weight") for part in parts]
            tensors[f"{layer}{whole}_proj.weight"] = torch.cat(each)


def with_more(tensors: Tensors) -> None:
    """What vLLM's loader leaves out."""
    for name in (
        *("rotary_pos_emb.inv_freq", "rotary_emb.inv_freq_long", "model.t2d", "fc.bias"),
        *("layers.0.self_attn.bias", "layers.1.self_attn.o_proj.bias", "mask_embedding"),
    ):
        tensors[name] = torch.full((256,), 3.0)


def outcome(drafter: Path) -> tuple[list[list[int]], int]:
    """Return the text and how many drafts were accepted."""
    speculative = {**FIXED, "model": str(drafter), "free_drafts": "off"}
    with engine(speculative_config=speculative, max_num_seqs=4) as llm:
        text = token_ids(llm, PROMPTS, PARAMS)
        (stats,) = llm.collective_rpc("dflash_stats")
        return text, stats["accepted_tokens"]


@slow_on_v2  # a runner does not see names
def test_the_same_drafts_are_accepted(tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(DRAFTER, drafter)
    tensors = load_file(drafter / "model.safetensors")
    for change in (fused, renamed, with_more):
        change(tensors)
    save_file(tensors, drafter / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((drafter / "config.json").read_text())
    config["layer_types"] = ["full_attention", "chunked_attention", "linear_attention"]
    (drafter / "config.json").write_text(json.dumps(config))
    expected = outcome(DRAFTER)
    assert expected[1] > 30
    assert outcome(drafter) == expected
