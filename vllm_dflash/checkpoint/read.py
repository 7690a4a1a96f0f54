"""Read a drafter's `config.json` into a `DrafterSpec`.

Dialect read today: z-lab's (`dflash_config` beside Qwen3-like fields), with the fields of
`dflash_config` also accepted at top level. The others are refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec

SLIDING = "sliding_attention"


def read_drafter(model: str, revision: str | None = None) -> DrafterSpec:
    """Read the spec of the drafter at `model`, a folder or a repository of the hub.

    Raises:
        DrafterError: the drafter is missing, is no DFlash checkpoint, or needs what we lack.
    """
    return parse_config(model, _load_config(model, revision))


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
    except (OSError, ValueError) as error:
        raise DrafterError(f"drafter {model!r}: config.json cannot be read: {error}") from error
    return config


def parse_config(model: str, config: dict[str, Any]) -> DrafterSpec:
    """Turn a parsed `config.json` into a spec. Pure. Raises `DrafterError`."""
    nested = config.get("dflash_config") or {}
    _refuse_what_is_no_dflash(model, config, nested)

    def field(name: str, default: Any = None) -> Any:
        value = nested.get(name)
        return config.get(name, default) if value is None else value

    def integer(name: str, *, least: int = 1, default: Any = None) -> int:
        value = field(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise DrafterError(
                f"drafter {model!r}: {name} must be an integer of at least {least},"
                f" config.json says {value!r}."
            )
        return value

    num_layers = integer("num_hidden_layers")
    num_heads = integer("num_attention_heads")
    hidden_size = integer("hidden_size")
    num_kv_heads = integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise DrafterError(
            f"drafter {model!r}: num_attention_heads ({num_heads}) must be a multiple of"
            f" num_key_value_heads ({num_kv_heads})."
        )
    num_target_layers = field("num_target_layers")
    return DrafterSpec(
        model=model,
        dialect="z-lab",
        block_size=integer("block_size", least=2),
        mask_token_id=integer("mask_token_id", least=0),
        taps=_read_taps(model, field("target_layer_ids")),
        target_hidden_size=integer("target_hidden_size", default=hidden_size),
        num_target_layers=None if num_target_layers is None else int(num_target_layers),
        vocab_size=integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=integer("head_dim", default=hidden_size // num_heads),
        hidden_act=str(field("hidden_act", "silu")),
        rms_norm_eps=float(field("rms_norm_eps", 1e-6)),
        attention_bias=bool(field("attention_bias", False)),
        rope_parameters=_read_rope(model, config),
        max_position_embeddings=integer("max_position_embeddings", default=32768),
        windows=_read_windows(model, config, nested, num_layers),
        causal=_read_causal(config, nested, num_layers),
    )


def _refuse_what_is_no_dflash(model: str, config: dict[str, Any], nested: dict[str, Any]) -> None:
    architectures = config.get("architectures") or []
    if config.get("speculators_model_type"):
        raise DrafterError(
            f"drafter {model!r}: speculators format"
            f" (speculators_model_type={config['speculators_model_type']!r}) is not read yet;"
            " use the z-lab checkpoint, or VLLM_PLUGINS='' for vLLM's own DFlash."
        )
    if "DFlashDraftModel" not in architectures:
        raise DrafterError(
            f"drafter {model!r} is not a DFlash checkpoint that can be read: config.json has"
            f" architectures {architectures}, expected ['DFlashDraftModel']."
        )
    if config.get("quantization_config"):
        raise DrafterError(f"drafter {model!r}: quantised drafters are not supported yet.")
    draft_vocab_size = config.get("draft_vocab_size")
    unsupported = {
        "attention_sink_bias": nested.get("attention_sink_bias") or None,
        "attention_value_scale": nested.get("attention_value_scale"),
        "sample_from_anchor": nested.get("sample_from_anchor") or None,
        "use_aux_hidden_state": False if nested.get("use_aux_hidden_state") is False else None,
        "draft_vocab_size": draft_vocab_size
        if draft_vocab_size != config.get("vocab_size")
        else None,
    }
    for name, value in unsupported.items():
        if value is not None:
            raise DrafterError(
                f"drafter {model!r}: {name}={value!r} is not supported yet;"
                " VLLM_PLUGINS='' gives vLLM's own DFlash."
            )


def _read_taps(model: str, ids: Any) -> tuple[int, ...]:
    valid = isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)
    if not valid:
        raise DrafterError(
            f"drafter {model!r}: dflash_config.target_layer_ids must be a non-empty list of"
            f" layer numbers, config.json says {ids!r}."
        )
    # vLLM sorts and de-duplicates the layers it captures, so any other order would silently
    # feed each column block of fc.weight from another layer.
    if ids != sorted(set(ids)):
        raise DrafterError(
            f"drafter {model!r}: dflash_config.target_layer_ids must be strictly ascending,"
            f" config.json says {ids}."
        )
    return tuple(ids)


def _read_rope(model: str, config: dict[str, Any]) -> dict[str, Any]:
    """Normalise `rope_parameters` (transformers 5) and `rope_theta`/`rope_scaling` (4)."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise DrafterError(
            f"drafter {model!r}: rope_parameters per layer type ({', '.join(nested)}) are not"
            " supported yet."
        )
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 1_000_000.0))
    return rope


def _read_windows(
    model: str, config: dict[str, Any], nested: dict[str, Any], num_layers: int
) -> tuple[int | None, ...]:
    """Sliding window per layer, resolved as vLLM's own DFlash model resolves it."""
    layer_types = config.get("layer_types")
    if layer_types is not None and len(layer_types) != num_layers:
        raise DrafterError(
            f"drafter {model!r}: layer_types names {len(layer_types)} layers,"
            f" num_hidden_layers is {num_layers}."
        )
    sliding = [kind == SLIDING for kind in layer_types or [""] * num_layers]
    if nested.get("use_swa") and not any(sliding):
        sliding = [True] * num_layers
    window = nested.get("swa_window_size", config.get("sliding_window"))
    if any(sliding) and (not isinstance(window, int) or window < 1):
        raise DrafterError(
            f"drafter {model!r}: a sliding layer needs dflash_config.swa_window_size or"
            f" sliding_window, config.json says {window!r}."
        )
    return tuple(window if is_sliding else None for is_sliding in sliding)


def _read_causal(
    config: dict[str, Any], nested: dict[str, Any], num_layers: int
) -> tuple[bool, ...]:
    """Causality per layer: an explicit setting wins, else only sliding layers are causal."""
    for explicit in (config.get("is_causal"), nested.get("causal")):
        if explicit is not None:
            return (bool(explicit),) * num_layers
    layer_types = config.get("layer_types") or [""] * num_layers
    return tuple(kind == SLIDING for kind in layer_types)
