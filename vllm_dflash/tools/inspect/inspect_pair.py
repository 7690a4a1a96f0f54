"""Inspects a pair: reads its configs and headers and fills in an `Inspection`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from vllm.config import ModelConfig
from vllm.config.cache import CacheDType
from vllm.engine.arg_utils import EngineArgs

from vllm_dflash.checkpoint.architectures import check_not_swapped
from vllm_dflash.checkpoint.headers import (
    Headers,
    HeadersNotCheckedError,
    HeadersUnreadableError,
    read_headers,
)
from vllm_dflash.checkpoint.names import by_our_names
from vllm_dflash.checkpoint.pairing import (
    PairingTarget,
    adapt_to_target,
    pair_faults,
    target_unsupported_reason,
)
from vllm_dflash.checkpoint.read import load_config, parse_overridden
from vllm_dflash.checkpoint.refusal import looks_local, missing_model_reason, one_line
from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec
from vllm_dflash.checkpoint.tensors import MAPS, quantised_parts, tensor_faults
from vllm_dflash.config.left_to_vllm import target_unsupported_reasons
from vllm_dflash.config.pair import target_facts
from vllm_dflash.tools.inspect.inspection import Fault, Inspection, TargetFacts, TensorFacts
from vllm_dflash.tools.inspect.memory import inspect_memory

FLOATS = {"F64", "F32", "F16", "BF16"}


def inspect_pair(
    drafter: str,
    target: str,
    *,
    revision: str | None = None,
    drafter_overrides: Mapping[str, Any] | None = None,
    tensor_parallel_size: int = 1,
    draft_kv_cache_dtype: str | None = None,
    **engine: Any,
) -> Inspection:
    """Find out what a drafter is, whether it fits a target, and how much memory it needs.

    Reads configs and the headers of safetensors files, from folders or repositories. Loads no
    weights and needs no GPU. Does not raise if the pair does not fit or cannot be read.

    `draft_kv_cache_dtype`: None: the target's. `engine`: other engine arguments of vLLM that affect
    the result, such as `max_model_len`.
    """
    found = Inspection(drafter, target)
    try:
        asked = {engine.get("kv_cache_dtype"), draft_kv_cache_dtype} - {None}
        if unknown := asked.difference(get_args(CacheDType)):
            names = ", ".join(get_args(CacheDType))
            raise ValueError(f"KV cache dtype {unknown.pop()!r} is none of {names}.")
        spec = found.drafter = _read_spec(drafter, revision, drafter_overrides, target)
        found.warnings += spec.remarks
        headers = _read_headers(found, drafter, revision)
        if headers is not None:
            found.tensors = _tensor_facts(found, spec, headers)
        model, facts = _read_target(target, engine)
    except ValueError as error:
        found.error = str(error)
        return found
    found.target = TargetFacts(
        model=target,
        architecture=facts.architecture,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=model.max_model_len,
    )
    remarks, spec = len(spec.remarks), adapt_to_target(spec, facts)
    found.warnings += spec.remarks[remarks:]
    if reason := target_unsupported_reason(facts):
        found.faults.append(Fault("target", reason))
    found.faults += [Fault("pair", message) for message in pair_faults(spec, facts)]
    found.warnings += [
        f"vLLM's own DFlash runs this target: {why}" for why in target_unsupported_reasons(model)
    ]
    if spec.max_position_embeddings < model.max_model_len:
        then = "longer ones continue without drafts"
        if spec.positions_go_on:
            then = "drafts beyond them may be worse"
        found.warnings.append(
            f"the drafter supports {spec.max_position_embeddings} positions, but requests may have"
            f" {model.max_model_len} tokens: {then}"
        )
    if undivided := _rank_faults(model, tensor_parallel_size):
        found.faults += [Fault("parallel", message) for message in undivided]
        found.not_checked.append("memory: the target cannot be split over this many ranks")
    else:
        tensors = headers.tensors if headers else {}
        cache_dtype = draft_kv_cache_dtype or engine.get("kv_cache_dtype", "auto")
        inspect_memory(found, tensors, model, tensor_parallel_size, cache_dtype)
    if not found.faults:
        config: dict[str, Any] = {"revision": revision}
        config |= {"drafter_overrides": dict(drafter_overrides or {})}
        config |= {"kv_cache_dtype": draft_kv_cache_dtype}
        written = {name: value for name, value in config.items() if value}
        found.speculative_config = {"method": "dflash", "model": drafter, **written}
        ranks = {} if tensor_parallel_size == 1 else {"tensor_parallel_size": tensor_parallel_size}
        found.command = _command(found, {**ranks, **engine})
    return found


def _read_spec(
    drafter: str, revision: str | None, overrides: Mapping[str, Any] | None, target: str
) -> DrafterSpec:
    config = load_config(drafter, revision)
    try:
        target_config = load_config(target)
    except DrafterError:  # reported later: the drafter's faults come first
        target_config = {}
    check_not_swapped(drafter, config, target, target_config)
    return parse_overridden(drafter, config, overrides or {})


def _read_headers(found: Inspection, drafter: str, revision: str | None) -> Headers | None:
    """Return the drafter's tensors by our names; None if they cannot be checked."""
    try:
        headers = read_headers(drafter, revision)
        return replace(headers, tensors=by_our_names(drafter, headers.tensors))
    except HeadersNotCheckedError as error:
        if Path(drafter).is_dir():
            raise ValueError(f"drafter {drafter!r}: {error}.") from error
        found.not_checked.append(f"the drafter's tensors: {error}")
        return None
    except HeadersUnreadableError as error:
        raise ValueError(f"drafter {drafter!r}: {error}") from error


def _tensor_facts(found: Inspection, spec: DrafterSpec, headers: Headers) -> TensorFacts:
    stored = headers.tensors
    found.faults += [Fault("tensors", message) for message in tensor_faults(spec, stored)]
    quantised = set().union(*quantised_parts(spec, stored).values())
    plain = {tensor.dtype for name, tensor in stored.items() if name not in {*MAPS, *quantised}}
    if odd := sorted({dtype for dtype in plain if dtype.startswith("F")} - FLOATS):
        found.warnings.append(
            f"tensors are stored as {', '.join(odd)}: they are loaded as plain numbers without"
            " scales, so a quantised checkpoint would draft nonsense"
        )
    return TensorFacts(
        files=list(headers.files),
        parameters=sum(tensor.count for name, tensor in stored.items() if name not in MAPS),
        num_bytes=headers.num_bytes,
        dtypes=headers.dtypes,
        own_embedding="embed_tokens.weight" in stored,
        own_head="lm_head.weight" in stored,
    )


def _read_target(target: str, engine: Mapping[str, Any]) -> tuple[ModelConfig, PairingTarget]:
    """Return vLLM's config of the target, and facts for pairing.

    Raises ValueError if the target cannot be read.
    """
    if found := missing_model_reason(target):
        raise ValueError(
            f"target {target!r}: {found}. Pass --target a folder with a model in Hugging Face's"
            " format, or the name of a repository."
        )
    try:
        args = EngineArgs(model=target, skip_tokenizer_init=True, **engine)
        model = args.create_model_config()
        return model, target_facts(model)
    except Exception as error:  # an arbitrary config can fail in arbitrary ways
        why = one_line(error) or type(error).__name__
        remedy = (
            "" if looks_local(target) else " Download it first, and pass the folder, or try again."
        )
        raise ValueError(f"target {target!r} cannot be read: {why}{remedy}") from error


def _rank_faults(model: ModelConfig, tp_size: int) -> list[str]:
    """Say why vLLM cannot split the target over `tp_size` ranks; empty if it can."""
    shape, ranks = model.model_arch_config, f"tensor_parallel_size {tp_size}"
    heads, kv_heads = shape.total_num_attention_heads, shape.total_num_kv_heads
    faults = []
    if heads % tp_size:
        faults.append(f"the target's {heads} attention heads do not divide by {ranks}")
    if not model.use_mla and kv_heads % tp_size and tp_size % kv_heads:
        faults.append(
            f"the target's {kv_heads} key/value heads neither divide by {ranks} nor divide it"
        )
    return faults


def _command(found: Inspection, engine: Mapping[str, Any]) -> str:
    """Return the `vllm serve` command for these settings."""
    words = ["vllm", "serve", found.target_model]
    for name, value in engine.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    words += ["--speculative-config", json.dumps(found.speculative_config)]
    return shlex.join(words)
