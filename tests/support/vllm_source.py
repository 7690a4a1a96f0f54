"""Check that vLLM's sources, parsed and never imported, have all that vllm_dflash relies on."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path
from typing import Any

from support import ROOT
from vllm_dflash.seams import SEAMS, Seam
from vllm_dflash.vllm_sources import DEFINITIONS, MissingError, Sources, imported_by, parameters_of

WATCHED = (
    Seam("vllm.config.speculative:SpeculativeConfig.use_eagle_block_drop"),
    Seam("vllm.config.vllm:VllmConfig.__post_init__"),
    Seam("vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder"),
    Seam("vllm.v1.core.sched.scheduler:Scheduler.schedule"),
    Seam("vllm.v1.outputs:AsyncModelRunnerOutput"),
    Seam("vllm.v1.worker.gpu.input_batch:get_num_sampled_and_rejected"),
    Seam("vllm.v1.worker.gpu.model_runner:GPUModelRunner.__init__"),
    Seam("vllm.v1.worker.gpu.model_runner:GPUModelRunner.add_requests"),
    Seam("vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample"),
    Seam("vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens"),
    Seam("vllm.v1.worker.gpu.sample.gumbel:gumbel_sample"),
    Seam("vllm.v1.worker.gpu.sample.sampler:Sampler.sample"),
    Seam("vllm.v1.worker.gpu.sample.states:SamplingStates.add_request"),
    Seam("vllm.v1.worker.gpu.spec_decode.adaptive_verification:AdaptiveVerificationManager"),
    Seam("vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__init__"),
    Seam("vllm.v1.worker.gpu.spec_decode.rejection_sampler:_gather_draft_sampled_kernel"),
    Seam("vllm.v1.worker.gpu.warmup:warmup_kernels"),
    Seam("vllm.v1.worker.gpu_model_runner:GPUModelRunner.__init__"),
    Seam("vllm.v1.worker.utils:AttentionGroup"),
)
"""We do not touch these, but rely on what they do."""

RECORDS = ROOT / "tests" / "seams"
Record = dict[str, Any]
"""`seams`: parameters and hash of each. `names`: all else we import from vLLM that is there."""


def _entry(file: Path, node: ast.stmt) -> Record:
    """Return a function's parameters, a class's abstract methods, and a hash of the text without
    docstrings and comments."""
    lines = dict(enumerate(file.read_text().splitlines()[: node.end_lineno], start=1))
    for inner in (one for one in ast.walk(node) if isinstance(one, DEFINITIONS)):
        if ast.get_docstring(inner, clean=False) is not None:
            for number in range(inner.body[0].lineno, (inner.body[0].end_lineno or 0) + 1):
                lines[number] = ""
    text = [lines[number].strip() for number in range(node.lineno, len(lines) + 1)]
    code = "\n".join(line for line in text if line and not line.startswith("#"))
    entry = {
        "parameters": parameters_of(node),
        "body": hashlib.sha256(code.encode()).hexdigest()[:12],
    }
    abstract = [
        one.name
        for one in getattr(node, "body", ())
        if "abstractmethod" in map(ast.unparse, getattr(one, "decorator_list", ()))
    ]
    return entry | ({"abstract": abstract} if abstract else {})


def all_seams(version: str) -> list[Seam]:
    """Return the seams of every process that this version of vLLM should have."""
    every = {seam.path: seam for some in (*SEAMS, WATCHED) for seam in some}
    return [every[path] for path in sorted(every) if every[path].is_in(version)]


def imported() -> set[frozenset[str]]:
    """Return what vllm_dflash imports from vLLM, as `module:name`; one of each set is enough."""
    return imported_by((ROOT / "vllm_dflash").rglob("*.py"))


def examine(sources: Sources, version: str) -> tuple[Record, list[str]]:
    """Return what to record of a version, and a line for each thing that is missing."""
    found, missing = {}, []
    for seam in all_seams(version):
        try:
            found[seam.path] = _entry(*sources.find(seam.path))
        except MissingError as error:
            missing.append(f"missing    {seam.path} ({error})")
    needed = imported()
    names = sorted(name for name in frozenset().union(*needed) if sources.has(name))
    missing += [f"missing    {' or '.join(sorted(one))}" for one in needed if one.isdisjoint(names)]
    return {"seams": found, "names": names}, sorted(missing)
