"""The engine's side: generate from each prompt, and have the worker write down what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dflash.tools.engine_answers import EngineAnswers
from vllm_dflash.tools.parity.compare_request import RecordedRequest
from vllm_dflash.tools.parity.recorder import RECORDED
from vllm_dflash.tools.parity.recording import Recording
from vllm_dflash.tools.progress import Progress, Silent

Prompt = str | list[int]


@dataclass(frozen=True)
class EngineSide:
    """What an engine did with some prompts."""

    requests: list[RecordedRequest]
    runner: str
    """Of vLLM: `v1` or `v2`."""
    nan_drafts: int


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
) -> EngineSide:
    """Generate so many tokens from each prompt, text or token ids, one after the other.

    The recordings go through the folder, which is all that the engine and the caller share.

    Raises:
        ValueError: a prompt is longer than the engine's context. Nothing is generated then.
    """
    progress = progress or Silent()
    with progress.stage("starting the engine"):
        limit = engine.facts()["max_model_len"]
    (before,) = engine.dflash_stats()
    token_ids = [engine.encode(texts=[one])[0] if isinstance(one, str) else one for one in prompts]
    for number, ids in enumerate(token_ids):
        needed = len(ids) + tokens + before["block_size"]
        if not ids or needed > limit:
            raise ValueError(
                f"prompt {number + 1} has {len(ids)} tokens; with {tokens} new ones and a block it"
                f" needs {needed}, the engine takes {limit}: raise"
                " --max-model-len, lower --tokens or pass other prompts."
            )
    requests = []
    with progress.stage("generating", len(prompts), "prompts") as tell:
        for number, ids in enumerate(token_ids):
            file = folder / f"{number}.safetensors"
            written = engine.record(token_ids=ids, tokens=tokens, file=str(file))
            requests.append(RecordedRequest([*ids, *written], len(ids), Recording.load(file)))
            tell(number + 1)
    (after,) = engine.dflash_stats()
    return EngineSide(requests, before["runner"], after["nan_drafts"] - before["nan_drafts"])
