"""The engine's side: what it did while it drafted for each prompt, as plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_dflash.tools.engine_answers import EngineAnswers
from vllm_dflash.tools.parity.recorder import RECORDED, DraftStep
from vllm_dflash.tools.progress import Progress

Prompt = str | list[int]


@dataclass
class Recording:
    """All context rows and draft steps of one request, in the order in which they came.

    T rows of m taps, H hidden size.
    """

    token_ids: list[int]
    """The prompt and the new tokens."""
    prompt_length: int
    features: torch.Tensor
    """Taps, concatenated in ascending layer order, [T, m * H_target]."""
    z: torch.Tensor
    """The same rows fused, as their keys and values were made of them, [T, H]."""
    positions: torch.Tensor
    """[T]. One that occurs twice was stored twice; the later row counts."""
    steps: list[DraftStep]
    runner: str
    """Of vLLM: `v1` or `v2`."""
    nan_drafts: int = 0
    """Drafts the engine threw away because their logits were not finite."""

    @classmethod
    def load(cls, path: Path, token_ids: list[int], prompt_length: int) -> Recording:
        """What `RecordedDrafting.take_recording` wrote while these tokens were generated."""
        found = torch.load(path, weights_only=True)
        steps = [DraftStep(**step) for step in found.pop("steps")]
        return cls(token_ids, prompt_length, steps=steps, **found)

    def visible_rows(self, step: DraftStep, length: int) -> torch.Tensor:
        """Row of each context position that this step sees, -1 where there is none: [length]."""
        rows = torch.full((length,), -1)
        # Ascending, so that of several rows of one position the last is kept.
        for row, position in enumerate(self.positions[: step.rows_taken].tolist()):
            if position < length:
                rows[position] = row
        return rows

    def context_lengths(self) -> list[int]:
        """Tokens before the bonus token at each step, by what was accepted so far."""
        lengths = []
        length = self.prompt_length
        for step in self.steps:
            lengths.append(min(length, len(self.token_ids) - 1))
            length += 1 + max(step.num_accepted, 0)
        return lengths


def engine_arguments(drafter: str, target: str, dtype: str, max_model_len: int) -> dict[str, Any]:
    """Arguments of an engine that can be recorded: eager, one request at a time, nothing cached."""
    return {
        "model": target,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "enforce_eager": True,  # hooks see nothing of compiled code
        "max_num_seqs": 1,
        "enable_prefix_caching": False,  # cached rows would never be recorded
        "async_scheduling": False,  # the worker must see each verdict before it drafts again
        "seed": 0,
        "worker_extension_cls": RECORDED,
        "speculative_config": {"method": "dflash", "model": drafter, "draft_length": "fixed"},
    }


def record_prompts(
    engine: EngineAnswers,
    prompts: Sequence[Prompt],
    tokens: int,
    folder: Path,
    progress: Progress | None = None,
) -> list[Recording]:
    """Generate so many tokens from each prompt, text or token ids, one after the other.

    The recordings go through the folder, which is all that the engine and the caller share.

    Raises:
        ValueError: a prompt is longer than the engine's context. Nothing is generated then.
    """
    progress = progress or Progress()
    with progress.stage("starting the engine"):
        limit = engine.facts()["max_model_len"]
    block_size = engine.dflash_stats()[0]["block_size"]
    token_ids = [engine.encode(texts=[one])[0] if isinstance(one, str) else one for one in prompts]
    for number, ids in enumerate(token_ids):
        needed = len(ids) + tokens + block_size
        if not ids or needed > limit:
            raise ValueError(
                f"prompt {number + 1} has {len(ids)} tokens; with {tokens} new ones and a block it"
                f" needs {needed}, the engine takes {limit}: raise"
                " --max-model-len, lower --tokens or pass other prompts."
            )
    recordings = []
    with progress.stage("generating", len(prompts), "prompts") as tell:
        for number, ids in enumerate(token_ids):
            file = folder / f"{number}.pt"
            written = engine.record(token_ids=ids, tokens=tokens, file=str(file))
            recordings.append(Recording.load(file, [*ids, *written], len(ids)))
            tell(number + 1)
    return recordings
