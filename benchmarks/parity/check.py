"""`check_parity`: runs the engine and the reference, and compares them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from engine_child import EngineChild

from parity.compare_recordings import compare
from parity.oracle import Oracle
from parity.parity_report import BUILT_IN, MAX_MODEL_LEN, TOKENS, ParityReport
from parity.recorded_answers import START, RecordedAnswers
from parity.recorder import RECORDED, Recording
from vllm_dflash.checkpoint.read import read_drafter
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.prompts import read_prompts
from vllm_dflash.tools.server import temporary_logs

Prompt = str | list[int]


def check_parity(
    drafter: str,
    target: str,
    *,
    prompts: Sequence[Prompt] | None = None,
    tokens: int = TOKENS,
    dtype: str = "float32",
    tolerance: float | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    revision: str | None = None,
    drafter_overrides: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **engine: Any,
) -> ParityReport:
    """Compare the engine's drafter with the reference, stage by stage.

    Both run on this machine, one after the other; the reference runs on the CPU.

    Args:
        drafter: folder or repository.
        target: folder or repository.
        prompts: texts or lists of token ids (default: the built-in ones).
        tokens: new tokens per prompt.
        dtype: dtype of both sides, `float32` or `bfloat16`.
        tolerance: largest relative error that counts as equal (default: by dtype).
        max_model_len: the engine's limit, reduced to the target's if that is lower.
        revision: revision of the drafter's repository.
        drafter_overrides: fields that override those of its `config.json`.
        progress: for reporting progress (default: silent).
        engine: more arguments of `vllm.LLM`, for targets that need some (`model_impl`).

    Raises:
        ValueError: the options or the pair do not fit.
        OSError: a model is missing.
        EngineDied: the engine did not start, or died; its log is kept.
    """
    ranks = engine.get("tensor_parallel_size", 1)
    if ranks != 1:
        raise ValueError(
            f"tensor_parallel_size is {ranks}, but parity reads every stage whole and a rank has"
            " only its part: leave it out. To check a split drafter, use `vllm-dflash verify ... --"
            f" --tensor-parallel-size {ranks}`."
        )
    # Refuse a bad drafter before anything is loaded.
    spec = read_drafter(drafter, revision, drafter_overrides)
    if spec.quantization is not None:
        raise ValueError(
            f"drafter {drafter!r} is quantised ({spec.quantization}), and the reference has no such"
            " layers: check the checkpoint that it was made from, and compare the acceptance"
            " lengths of both with `vllm-dflash verify`."
        )
    prompts, progress = prompts or read_prompts(BUILT_IN), progress or Progress()
    arguments = engine_arguments(drafter, target, dtype, _shorter(target, max_model_len)) | engine
    asked = {"revision": revision, "drafter_overrides": drafter_overrides}
    arguments["speculative_config"] |= {name: value for name, value in asked.items() if value}
    with (
        tempfile.TemporaryDirectory(prefix="vllm-dflash-parity-") as folder,
        temporary_logs("vllm-dflash-parity-") as logs,
    ):
        with EngineChild(logs / "engine.log", START, **arguments) as child:
            recordings = record_prompts(child, prompts, tokens, Path(folder), progress)
        with progress.stage("loading the reference"):
            kind = getattr(torch, dtype)
            oracle = Oracle.load(target, drafter, kind, revision, drafter_overrides)
        return compare(recordings, oracle, tolerance, progress)


def engine_arguments(drafter: str, target: str, dtype: str, max_model_len: int) -> dict[str, Any]:
    """Return arguments for an engine that can be recorded: eager, one request, no prefix cache."""
    return {
        "model": target,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "enforce_eager": True,  # compiled code calls no hooks
        "max_num_seqs": 1,
        "enable_prefix_caching": False,  # cached rows would never be recorded
        "async_scheduling": False,  # the worker must see each verdict before it drafts again
        "seed": 0,
        "worker_extension_cls": RECORDED,
        "speculative_config": {"method": "dflash", "model": drafter, "draft_length": "fixed"},
    }


def record_prompts(
    engine: RecordedAnswers | EngineChild,
    prompts: Sequence[Prompt],
    tokens: int,
    folder: Path,
    progress: Progress | None = None,
) -> list[Recording]:
    """Generate and record `tokens` tokens from each prompt, one prompt after the other.

    The engine hands recordings over as files in `folder`.

    Raises:
        ValueError: a prompt does not fit the engine's context; nothing is generated then.
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
                f" needs {needed}, but the engine takes {limit}: raise"
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


def _shorter(target: str, max_model_len: int) -> int:
    """Return `max_model_len`, or the target's own limit if that is lower."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target).get_text_config()
    return min(max_model_len, getattr(config, "max_position_embeddings", None) or max_model_len)
