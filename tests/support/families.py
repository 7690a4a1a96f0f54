"""Targets of all families, each with a drafter and what it writes in Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from reference.reference_drafter import ReferenceDrafter, target_step
from support.engines import FIXED, engine
from support.pairs import drafter_config, save_drafter
from support.targets import ENGINE_SETTINGS, continued, make_target

NEW_TOKENS = 24
PROMPTS = [[(7 * row + 3 * i) % 300 for i in range(length)] for row, length in enumerate((9, 90))]
LAST = 3
"""The targets' last layer."""
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}


@dataclass
class Family:
    """A target with a drafter whose windows are shorter than the contexts it will see."""

    folder: Path
    name: str
    target: PreTrainedModel
    drafter: ReferenceDrafter
    written: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]]
    """Each prompt with what the target writes, [1, T], and its features, [T, m * H]."""

    def drafting(self) -> Any:
        """Start an engine of the pair."""
        settings = {"model": str(self.folder / "target"), "skip_tokenizer_init": True}
        settings |= {"max_model_len": 256, "max_num_seqs": 4, **ENGINE_SETTINGS.get(self.name, {})}
        drafts = {**FIXED, "model": str(self.folder / "drafter")}
        return engine(**settings, speculative_config=drafts)


def make_family(folder: Path, name: str) -> Family:
    target = make_target(folder / "target", name)
    # The last layer's output is tapped before the final norm.
    taps = {"target_layer_ids": [0, LAST]}
    spec = save_drafter(folder / "drafter", drafter_config(**MIXED, dflash_config=taps))
    # Before any engine: `--model-impl transformers` changes the model's class in this process.
    written = {tuple(prompt): write(target, prompt, spec.taps) for prompt in PROMPTS}
    return Family(folder, name, target, ReferenceDrafter.load(spec, folder / "drafter"), written)


@torch.inference_mode()
def write(
    target: PreTrainedModel, prompt: list[int], taps: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prompt with its greedy continuation by Hugging Face, and the features of both."""
    ids = torch.tensor([continued(target, prompt, NEW_TOKENS)])
    return ids, target_step(target, ids, DynamicCache(config=target.config), taps)[1]
