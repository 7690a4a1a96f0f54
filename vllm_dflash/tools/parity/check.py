"""`check_parity`: run the engine, run the reference, compare."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_dflash.checkpoint.read import read_drafter
from vllm_dflash.tools.engine_process import EngineProcess, temporary_logs
from vllm_dflash.tools.parity.causes import likely_cause
from vllm_dflash.tools.parity.compare_request import compare_request
from vllm_dflash.tools.parity.engine_side import (
    EngineSide,
    Prompt,
    engine_arguments,
    record_prompts,
)
from vllm_dflash.tools.parity.oracle import Oracle
from vllm_dflash.tools.parity.parity_defaults import (
    BUILT_IN_PROMPTS,
    MAX_MODEL_LEN,
    TOKENS,
    TOLERANCES,
)
from vllm_dflash.tools.parity.parity_report import ACCUMULATED, ParityReport, first_difference
from vllm_dflash.tools.parity.stages import StageErrors
from vllm_dflash.tools.progress import Progress, Silent


def check_parity(
    drafter: str,
    target: str,
    *,
    prompts: Sequence[Prompt] = BUILT_IN_PROMPTS,
    tokens: int = TOKENS,
    dtype: str = "float32",
    tolerance: float | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    revision: str | None = None,
    drafter_overrides: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **engine: Any,
) -> ParityReport:
    """Compare the engine's drafter with the reference, stage by stage, on a pair.

    Both run on this machine, one after the other; the reference on the CPU.

    Args:
        drafter: folder or repository.
        target: folder or repository.
        prompts: texts, or lists of token ids.
        tokens: new tokens of each prompt.
        dtype: of both sides, `float32` or `bfloat16`.
        tolerance: largest relative error that counts as equal; by dtype unless given.
        max_model_len: of the engine, or less if the target has less.
        revision: of the drafter's repository.
        drafter_overrides: fields that stand in for those of its `config.json`.
        progress: told what is going on (default: nobody is).
        engine: more arguments of `vllm.LLM`, for targets that need some (`model_impl`).

    Raises:
        ValueError: options or pair do not fit.
        OSError: a model is missing.
        EngineDied: the engine did not start, or died; its log is kept.
    """
    ranks = engine.get("tensor_parallel_size", 1)
    if ranks != 1:
        raise ValueError(
            f"tensor_parallel_size is {ranks}, but parity reads every stage whole and a rank has"
            " only its part: leave it out. What a split drafter writes is checked by `vllm-dflash"
            f" verify ... -- --tensor-parallel-size {ranks}`."
        )
    # Refuses a bad one before anything is loaded.
    spec = read_drafter(drafter, revision, drafter_overrides)
    if spec.quantization is not None:
        raise ValueError(
            f"drafter {drafter!r} is quantised ({spec.quantization}), and the reference has no"
            " such layers: compare the checkpoint it was made from, and both with `vllm-dflash"
            " verify`, whose report has each one's acceptance length."
        )
    arguments = engine_arguments(drafter, target, dtype, _shorter(target, max_model_len)) | engine
    for key, value in (("revision", revision), ("drafter_overrides", drafter_overrides)):
        if value:
            arguments["speculative_config"][key] = value
    with (
        tempfile.TemporaryDirectory(prefix="vllm-dflash-parity-") as folder,
        temporary_logs("vllm-dflash-parity-") as logs,
    ):
        with EngineProcess(logs / "engine.log", **arguments) as process:
            side = record_prompts(process.answers, prompts, tokens, Path(folder), progress)
        return compare(
            side,
            drafter,
            target,
            dtype,
            tolerance,
            revision=revision,
            drafter_overrides=drafter_overrides,
            progress=progress,
        )


def compare(
    side: EngineSide,
    drafter: str,
    target: str,
    dtype: str = "float32",
    tolerance: float | None = None,
    *,
    revision: str | None = None,
    drafter_overrides: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ParityReport:
    """The engine's side against the reference's. Raises as `check_parity` does."""
    import torch

    tolerance = TOLERANCES[dtype] if tolerance is None else tolerance
    progress = progress or Silent()
    with progress.stage("loading the reference"):
        oracle = Oracle.load(target, drafter, getattr(torch, dtype), revision, drafter_overrides)
    errors = StageErrors(oracle.drafter.spec)
    acceptance = []
    with progress.stage("comparing", len(side.requests), "prompts") as tell:
        for number, request in enumerate(side.requests):
            acceptance.append(compare_request(oracle, request, number, errors))
            tell(number + 1)
    if not any(one.engine for one in acceptance):
        raise ValueError("the engine drafted nothing: pass more --tokens or other prompts.")
    stages = errors.stages()
    culprit, cause = first_difference(stages, tolerance), None
    if culprit is not None:
        cause = likely_cause(culprit, oracle, side.requests, tolerance)
    elif any(stage.worst > tolerance for stage in stages):
        cause = ACCUMULATED
    return ParityReport(
        drafter=drafter,
        target=target,
        runner=side.runner,
        dtype=dtype,
        tolerance=tolerance,
        stages=stages,
        acceptance=tuple(acceptance),
        nan_drafts=side.nan_drafts,
        culprit=culprit.name if culprit else None,
        cause=cause,
    )


def _shorter(target: str, max_model_len: int) -> int:
    """The length asked for, unless the target's own is less."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(target).get_text_config()
    return min(max_model_len, getattr(config, "max_position_embeddings", None) or max_model_len)
