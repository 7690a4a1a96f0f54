"""Read a drafter's `config.json` into a `DrafterSpec`.

Dialects: z-lab's (`dflash_config` alongside Qwen3-like fields, or its fields at top level) and the
speculators library's (`transformer_layer_config`, tap numbers that count the embedding), which is
translated to the first. Others are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from transformers import PretrainedConfig

from vllm_dflash.checkpoint.architectures import check_architectures
from vllm_dflash.checkpoint.dialects import (
    FULL,
    ONLY_NESTED,
    SLIDING,
    Speculators,
    ZlabConfig,
    as_zlab,
)
from vllm_dflash.checkpoint.refusal import (
    checked,
    looks_local,
    missing_model_reason,
    one_line,
    shown,
)
from vllm_dflash.checkpoint.rope import ASSUMED_BASE, read_rope
from vllm_dflash.checkpoint.spec import (
    ARCHITECTURE_2,
    ARCHITECTURE_LILICORR,
    DFlash2,
    DrafterError,
    DrafterShape,
    DrafterSpec,
    LiLiCorr,
)
from vllm_dflash.checkpoint.unread_keys import LENGTH_HEADS, remarks_on_keys, unread_overrides

ABOUT_ASSUMED_BASE = (
    f"config.json states no rope_theta: {ASSUMED_BASE:,.0f} is assumed. If the drafter was trained"
    ' with another base, few drafts are accepted: write it as "rope_theta" in "drafter_overrides"'
    " of the speculative config"
)


def read_drafter(
    model: str, revision: str | None = None, overrides: Mapping[str, Any] | None = None
) -> DrafterSpec:
    """Read the spec of the drafter at `model`, a folder or a hub repository.

    `overrides`: fields that replace those of `config.json`, named as in its own format or in
    z-lab's; `dflash_config` is merged.

    Raises:
        DrafterError: the drafter is missing, not a DFlash checkpoint or not supported, or nothing
            reads an override.
    """
    return parse_overridden(model, load_config(model, revision), overrides or {})


def load_config(model: str, revision: str | None = None) -> dict[str, Any]:
    """The unchanged `config.json` of a folder or a repository. Raises `DrafterError`."""
    if found := missing_model_reason(model):
        raise DrafterError(
            f"drafter {model!r}: {found}. Set 'model' in the speculative config to a folder with a"
            " DFlash checkpoint or to the name of its repository."
        )
    try:
        config, _ = PretrainedConfig.get_config_dict(model, revision=revision)
    except (TypeError, AttributeError):
        config = None  # null or a number: transformers looks for a field in it
    except (OSError, ValueError, RecursionError) as error:  # the last: nested too deeply
        what, remedy = f"drafter {model!r}", ""
        if not looks_local(model):
            what = f"{what}: no such folder, and in the repository of that name"
            remedy = " Check its name and the network, or pass a folder it was downloaded to."
        why = one_line(error).removesuffix(".") or type(error).__name__
        # `from None`: tracebacks of the libraries below would bury this message.
        raise DrafterError(f"{what}: config.json cannot be read: {why}.{remedy}") from None
    if not isinstance(config, dict):
        raise DrafterError(f"drafter {model!r}: config.json cannot be read: it is not an object.")
    return config


def config_field(
    config: Mapping[str, Any], name: str, overrides: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """A field of `config.json` in any dialect, by z-lab's name: in its `dflash_config` or at top
    level; None if it has neither. `overrides`: see `read_drafter`."""
    fields = {**config, **overrides}
    with suppress(ValueError):  # `parse_config` says why, if this is a drafter of ours
        fields |= _in_zlab({**config}, overrides)[1]
    nested = fields.get("dflash_config")
    inside = nested.get(name) if isinstance(nested, Mapping) else None
    return fields.get(name) if inside is None else inside


def parse_overridden(
    model: str, config: dict[str, Any], overrides: Mapping[str, Any]
) -> DrafterSpec:
    """Parse with `overrides` instead of the config's own fields; see `read_drafter`.

    Raises:
        DrafterError: the result cannot be read, or nothing reads an override.
    """
    spec, length = parse_config(model, config, overrides), "max_position_embeddings"
    if (
        config.get("speculators_model_type") is not None
        and config.get("speculators_config") is None
    ):
        raise DrafterError(
            f"drafter {model!r}: config.json has speculators_model_type but no speculators_config,"
            " by which vLLM recognises the speculators library's format. Copy it from the published"
            ' config.json, or add "speculators_config": {"algorithm": "dflash"} to this one.'
        )
    if unread := unread_overrides(spec, overrides):
        raise DrafterError(
            f"drafter {model!r}: drafter_overrides: {'; '.join(unread)}. Correct or remove it."
        )
    rope = spec.rope_parameters
    is_rotated_by_it = rope["rope_type"] == "yarn" and (
        rope["original_max_position_embeddings"] == spec.max_position_embeddings
    )
    nested = overrides.get("dflash_config") or {}
    is_other = config_field(config, length) != spec.max_position_embeddings
    if length in {*overrides, *nested} and is_other and not is_rotated_by_it:
        # vLLM reads it from the file.
        raise DrafterError(
            f"drafter {model!r}: drafter_overrides: {length} changes nothing in how the drafter is"
            ' read. Remove it. How long requests are drafted is "max_model_len" of the speculative'
            " config."
        )
    return spec


def parse_config(
    model: str, config: dict[str, Any], overrides: Mapping[str, Any] = MappingProxyType({})
) -> DrafterSpec:
    """Turn a parsed `config.json` into a spec. Pure function. Raises `DrafterError`."""
    try:
        return _parsed(model, *_in_zlab(config, overrides))
    except ValueError as why:
        raise DrafterError(f"drafter {model!r}: {why}.") from None


def _in_zlab(config: dict[str, Any], overrides: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The dialect of a config, and its fields in z-lab's format; raises `ValueError`."""
    written = _merged(config, overrides)
    dialect, fields = as_zlab(written)
    if fields is not written:  # translated, so names of z-lab's format have a meaning now
        in_zlab = overrides.keys() - Speculators.model_fields.keys()
        fields = _merged(fields, {name: overrides[name] for name in in_zlab})
    return dialect, fields


def _merged(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Replace fields of a config, and those of its `dflash_config` one by one."""
    nested = [fields.get("dflash_config") for fields in (config, overrides)]
    merged = {**config, **overrides}
    if all(isinstance(fields, Mapping) for fields in nested):
        merged["dflash_config"] = {**nested[0], **nested[1]}  # type: ignore[dict-item]
    return merged


def _parsed(model: str, dialect: str, config: dict[str, Any]) -> DrafterSpec:
    """The spec, from z-lab's format; raises `ValueError` with a message without the full stop."""
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"dflash_config must be an object, config.json says {shown(nested)}")
    architectures = config.get("architectures") or []
    check_architectures(architectures)
    at_top = {name: value for name, value in config.items() if name not in ONLY_NESTED}
    inside = {name: value for name, value in nested.items() if value is not None}
    fields = checked(ZlabConfig, at_top | inside)
    rope, base_is_assumed = read_rope(config, fields)
    dflash2, lilicorr = None, None
    if ARCHITECTURE_LILICORR in architectures:
        lilicorr = _read_lilicorr(inside, fields)
    elif ARCHITECTURE_2 in architectures:
        dflash2 = _read_dflash2(inside, fields)
    length_heads = tuple(head for head in LENGTH_HEADS if nested.get(f"use_{head}") is True)
    return DrafterSpec(
        **{name: getattr(fields, name) for name in DrafterShape.model_fields},
        **fields.derived(),
        model=model,
        dialect=dialect,
        rope_parameters=rope,
        base_is_assumed=base_is_assumed,
        dflash2=dflash2,
        lilicorr=lilicorr,
        length_heads=length_heads,
        remarks=(
            *([ABOUT_ASSUMED_BASE] if base_is_assumed else []),
            *(
                f"layer_types has {kind!r}: such layers get full attention, as in vLLM's own DFlash"
                for kind in dict.fromkeys(fields.layer_types)
                if kind not in (FULL, SLIDING)
            ),
            *remarks_on_keys(nested, length_heads, type(lilicorr or dflash2)),
        ),
    )


def _read_dflash2(nested: Mapping[str, Any], layers: ZlabConfig) -> DFlash2:
    """Read only `dflash_config`, as vLLM does: at top level, these fields are the target's."""
    own = {name: nested.get(name) for name in DFlash2.model_fields}
    fields = checked(DFlash2, own, inside="dflash_config")
    _check_candidates(
        "DFlash 2", fields.conv_group_size, ("selector_top_k", fields.selector_top_k), layers
    )
    cap = fields.final_logit_softcapping or None  # 0 means none, as in vLLM
    return fields.model_copy(update={"final_logit_softcapping": cap})


def _read_lilicorr(nested: Mapping[str, Any], layers: ZlabConfig) -> LiLiCorr:
    """Read only `dflash_config`, as vLLM does."""
    fields = checked(LiLiCorr, nested, inside="dflash_config")
    count, taps, group = fields.candidate_topk, fields.conv_kernel_size, fields.conv_group_size
    width = fields.hidden_size or layers.hidden_size
    if layers.sample_from_anchor:
        raise ValueError(
            "sample_from_anchor is true, so its first row predicts a token too; neither"
            " vllm-dflash nor vLLM's own DFlash runs such LiLiCorr drafters"
        )
    if not fields.enabled:
        raise ValueError("lilicorr_enabled is false, so it is not a LiLiCorr drafter")
    if count & (count - 1):
        raise ValueError(f"lilicorr_candidate_topk must be a power of two, it is {count}")
    if width % fields.num_heads:
        raise ValueError(
            f"lilicorr_num_heads ({fields.num_heads}) must divide lilicorr_hidden_size ({width})"
        )
    if bool(taps) != bool(group):
        raise ValueError(
            f"conv_kernel_size is {taps} and conv_group_size {group}: without convolutions, both"
            " must be 0 or left out"
        )
    if layers.target_hidden_size != layers.hidden_size:
        raise ValueError(
            f"target_hidden_size is {layers.target_hidden_size} and hidden_size"
            f" {layers.hidden_size}: a LiLiCorr drafter reads its target's embedding, so they must"
            " be equal"
        )
    _check_candidates("LiLiCorr", group or 1, ("lilicorr_candidate_topk", count), layers)
    return fields.model_copy(update={"hidden_size": width})


def _check_candidates(
    kind: str, group_size: int, candidates: tuple[str, int], layers: ZlabConfig
) -> None:
    """Check what all drafters with candidates need; `candidates`: name and value of their count."""
    name, count = candidates
    if layers.hidden_size % group_size:
        raise ValueError(
            f"conv_group_size ({group_size}) must divide hidden_size ({layers.hidden_size})"
        )
    if layers.draft_vocab_size != layers.vocab_size:
        raise ValueError(
            f"draft_vocab_size is {layers.draft_vocab_size} and vocab_size {layers.vocab_size}: a"
            f" {kind} drafter chooses among all tokens of its target, so they must be equal"
        )
    if count > layers.vocab_size:
        raise ValueError(f"{name} ({count}) must not exceed vocab_size ({layers.vocab_size})")
