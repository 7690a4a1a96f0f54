"""Read a drafter's `config.json` into a `DrafterSpec`.

Dialects: z-lab's (`dflash_config` beside Qwen3-like fields, or its fields at top level) and the
speculators library's (`transformer_layer_config`, tap numbers that count the embedding). The
second is turned into the first, so one parser reads both. Others are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from vllm_dflash.checkpoint.fields import MOST, ConfigFields, shown
from vllm_dflash.checkpoint.rope import read_rope
from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec
from vllm_dflash.checkpoint.speculators import from_speculators

FULL, SLIDING = "full_attention", "sliding_attention"


def read_drafter(
    model: str, revision: str | None = None, overrides: Mapping[str, Any] | None = None
) -> DrafterSpec:
    """Read the spec of the drafter at `model`, a folder or a repository of the hub.

    Args:
        model: the folder, or the name of the repository.
        revision: of the repository.
        overrides: fields that stand in for those of `config.json`; `dflash_config` is merged.

    Raises:
        DrafterError: the drafter is missing, is no DFlash checkpoint, or needs what we lack; or
            an override means nothing.
    """
    config = _load_config(model, revision)
    if not overrides:
        return parse_config(model, config)
    spec = parse_config(model, _overridden(config, overrides))
    idle = [name for name in overrides if _is_idle(name, overrides, model, config, spec)]
    if idle:
        raise DrafterError(
            f"drafter {model!r}: drafter_overrides: {idle} changes nothing in how it is read."
        )
    return spec


def _is_idle(
    name: str,
    overrides: Mapping[str, Any],
    model: str,
    config: dict[str, Any],
    spec: DrafterSpec,
) -> bool:
    """Whether the spec is the same without this one of the overrides."""
    others = {key: value for key, value in overrides.items() if key != name}
    try:
        return parse_config(model, _overridden(config, others)) == spec
    except DrafterError:  # which this one mends
        return False


def _overridden(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**config, **overrides}
    nested = [fields.get("dflash_config") for fields in (config, overrides)]
    if all(isinstance(fields, Mapping) for fields in nested):
        merged["dflash_config"] = {**nested[0], **nested[1]}  # type: ignore[dict-item]
    return merged


def _load_config(model: str, revision: str | None) -> dict[str, Any]:
    looks_local = model.startswith((".", "/", "~")) or Path(model).exists()
    if looks_local and not (Path(model) / "config.json").is_file():
        found = "has no config.json" if Path(model).is_dir() else "does not exist"
        raise DrafterError(
            f"drafter {model!r}: this folder {found}. Set 'model' in the speculative config to"
            " a folder with a DFlash checkpoint or to its repository name."
        )
    try:
        config, _ = PretrainedConfig.get_config_dict(model, revision=revision)
    # The last three: where the JSON is no object, or nested without end.
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DrafterError(f"drafter {model!r}: config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise DrafterError(f"drafter {model!r}: config.json cannot be read: it is no object.")
    return config


def parse_config(model: str, config: dict[str, Any]) -> DrafterSpec:
    """Turn a parsed `config.json` into a spec. Pure. Raises `DrafterError`."""
    dialect = "z-lab"
    if config.get("speculators_model_type") is not None:
        dialect, config = "speculators", from_speculators(model, config)
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise DrafterError(
            f"drafter {model!r}: dflash_config must be an object, config.json says {shown(nested)}."
        )
    _refuse_what_is_no_dflash(model, config, nested)

    fields = ConfigFields(model, config, nested)
    integer = fields.integer
    num_layers = integer("num_hidden_layers")
    num_heads = integer("num_attention_heads")
    hidden_size = integer("hidden_size")
    num_kv_heads = integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise DrafterError(
            f"drafter {model!r}: num_attention_heads ({num_heads}) must be a multiple of"
            f" num_key_value_heads ({num_kv_heads})."
        )
    head_dim = integer("head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise DrafterError(
            f"drafter {model!r}: head_dim must be even to be rotated, it is {head_dim}."
        )
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.refuse(
            "hidden_act", "'silu', which is all that vLLM's gated MLP has", fields.get("hidden_act")
        )
    vocab_size = integer("vocab_size")
    max_positions = integer("max_position_embeddings", default=32768)
    has_value_scale = fields.get("attention_value_scale") is not None
    return DrafterSpec(
        model=model,
        dialect=dialect,
        block_size=integer("block_size", least=2),
        mask_token_id=integer("mask_token_id", least=0),
        taps=_read_taps(model, fields.get("target_layer_ids")),
        target_hidden_size=integer("target_hidden_size", default=hidden_size),
        num_target_layers=(
            None if fields.get("num_target_layers") is None else integer("num_target_layers")
        ),
        vocab_size=vocab_size,
        draft_vocab_size=integer("draft_vocab_size", default=vocab_size),
        hidden_size=hidden_size,
        intermediate_size=integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_act="silu",
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        attention_bias=fields.flag("attention_bias", False),
        rope_parameters=read_rope(model, config, max_positions),
        max_position_embeddings=max_positions,
        windows=_read_windows(model, config, nested, num_layers),
        causal=_read_causal(fields, num_layers),
        attention_sinks=fields.flag(
            "attention_sink_bias", config.get("add_swa_attention_sink_bias", False)
        ),
        value_scale=fields.number("attention_value_scale", 1.0) if has_value_scale else None,
        logit_scale=fields.number("logit_scale", 1.0),
        is_neox_style=fields.flag("is_neox_style", True),
    )


def _refuse_what_is_no_dflash(model: str, config: dict[str, Any], nested: dict[str, Any]) -> None:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or "DFlashDraftModel" not in architectures:
        raise DrafterError(
            f"drafter {model!r} is not a DFlash checkpoint that can be read: config.json has"
            f" architectures {architectures}, expected ['DFlashDraftModel']."
        )
    if config.get("quantization_config"):
        raise DrafterError(f"drafter {model!r}: quantised drafters are not supported yet.")
    if nested.get("sample_from_anchor"):
        raise DrafterError(
            f"drafter {model!r}: sample_from_anchor is true, so its first row predicts as well;"
            " neither vllm-dflash nor vLLM's own DFlash runs such drafters."
        )
    if nested.get("use_aux_hidden_state", config.get("use_aux_hidden_state")) is False:
        raise DrafterError(
            f"drafter {model!r}: use_aux_hidden_state is false, so it reads the target's last"
            " hidden states instead of taps, which is not supported; VLLM_PLUGINS='' gives"
            " vLLM's own DFlash."
        )


def _read_taps(model: str, ids: Any) -> tuple[int, ...]:
    valid = isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)
    if not valid:
        raise DrafterError(
            f"drafter {model!r}: dflash_config.target_layer_ids must be a non-empty list of"
            f" layer numbers, config.json says {shown(ids)}."
        )
    # vLLM sorts and de-duplicates the layers it captures, so any other order would silently
    # feed each column block of fc.weight from another layer.
    if ids != sorted(set(ids)):
        raise DrafterError(
            f"drafter {model!r}: dflash_config.target_layer_ids must be strictly ascending,"
            f" config.json says {shown(ids)}."
        )
    if len(ids) > MOST["num_hidden_layers"]:
        raise DrafterError(
            f"drafter {model!r}: dflash_config.target_layer_ids names {len(ids)} layers."
        )
    return tuple(ids)


def _read_windows(
    model: str, config: dict[str, Any], nested: dict[str, Any], num_layers: int
) -> tuple[int | None, ...]:
    """Sliding window per layer, resolved as vLLM's own DFlash model resolves it."""
    layer_types = config.get("layer_types")
    if layer_types is not None and not (
        isinstance(layer_types, list) and all(kind in (FULL, SLIDING) for kind in layer_types)
    ):
        raise DrafterError(
            f"drafter {model!r}: layer_types must be a list of {FULL!r} and {SLIDING!r},"
            f" config.json says {shown(layer_types)}."
        )
    if layer_types is not None and len(layer_types) != num_layers:
        raise DrafterError(
            f"drafter {model!r}: layer_types names {len(layer_types)} layers,"
            f" num_hidden_layers is {num_layers}."
        )
    sliding = [kind == SLIDING for kind in layer_types or [""] * num_layers]
    if nested.get("use_swa") and not any(sliding):
        sliding = [True] * num_layers
    window = nested.get("swa_window_size", config.get("sliding_window"))
    if any(sliding) and (type(window) is not int or not 1 <= window < 1 << 31):
        raise DrafterError(
            f"drafter {model!r}: a sliding layer needs dflash_config.swa_window_size or"
            f" sliding_window, config.json says {shown(window)}."
        )
    return tuple(window if is_sliding else None for is_sliding in sliding)


def _read_causal(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Causality per layer: an explicit setting wins, else only sliding layers are causal."""
    for name, source in (("is_causal", fields.config), ("causal", fields.nested)):
        if source.get(name) is not None:
            return (fields.flag(name, False),) * num_layers
    layer_types = fields.config.get("layer_types") or [""] * num_layers
    return tuple(kind == SLIDING for kind in layer_types)
