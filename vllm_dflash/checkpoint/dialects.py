"""Fields of a drafter's `config.json`, in z-lab's format and in the speculators library's.

A speculators config is translated to z-lab's format, so one parser reads both.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

from vllm_dflash.checkpoint.refusal import LARGEST, checked, described, flag, shown
from vllm_dflash.checkpoint.spec import ARCHITECTURE, ARCHITECTURE_2, DFlash2, DrafterShape

FULL, SLIDING = "full_attention", "sliding_attention"

ONLY_NESTED = ("causal", "causal_head", "sample_from_anchor", "swa_window_size", "use_swa")
"""Fields read only from `dflash_config`, as in vLLM; others may also be at top level."""

UNSUPPORTED = (
    (
        "causal_head",
        True,
        "so it is a JetSpec drafter, whose head predicts each token from those before it; neither"
        " vllm-dflash nor vLLM 0.32 runs such drafters. Use a DFlash drafter for the same target",
    ),
    (
        "use_aux_hidden_state",
        False,
        "so it reads the target's last hidden states instead of taps; vLLM's own DFlash runs such"
        " drafters",
    ),
)
"""Fields whose value names another kind of drafter, the value, and the rest of the message."""


class ZlabConfig(DrafterShape):
    """Every field that is read from z-lab's format, except rotary ones (`rope.py`)."""

    add_swa_attention_sink_bias: bool = flag(False)
    attention_sink_bias: bool = flag(lambda read: read["add_swa_attention_sink_bias"])
    layer_types: list[str] = described(
        lambda read: [FULL] * read["num_layers"],
        f"a list of {FULL!r} and {SLIDING!r}",
        fail_fast=True,
    )
    use_swa: bool = flag(False)
    sliding_window: Any = None
    swa_window_size: Any = Field(default_factory=lambda read: read["sliding_window"])
    """Used and checked only if a layer slides."""
    is_causal: bool | None = flag(None)
    causal: bool | None = flag(None)
    causal_head: bool = flag(False)
    use_aux_hidden_state: bool = flag(True)
    quantization_config: dict[str, Any] | None = described(None, "an object")

    @field_validator("layer_types")
    @classmethod
    def _known(cls, kinds: list[str]) -> list[str]:
        # transformers refuses other names. vLLM's own DFlash gives all but sliding layers full
        # attention.
        if not {*ALLOWED_LAYER_TYPES}.issuperset(kinds):
            raise ValueError(cls.model_fields["layer_types"].description)
        return kinds

    @field_validator("taps")
    @classmethod
    def _ascending(cls, ids: tuple[int, ...]) -> tuple[int, ...]:
        # vLLM sorts and de-duplicates the layers it captures, so any other order would silently
        # feed each column block of fc.weight from another layer.
        if list(ids) != sorted(set(ids)):
            raise ValueError("strictly ascending")
        return ids

    @model_validator(mode="before")
    @classmethod
    def _is_supported(cls, written: dict[str, Any]) -> dict[str, Any]:
        for name, value, why in UNSUPPORTED:
            if written.get(name) is value:
                raise ValueError(f"{name} is {str(value).lower()}, {why}")
        return written

    @model_validator(mode="after")
    def _is_consistent(self) -> ZlabConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of"
                f" num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even to be rotated, it is {self.head_dim}")
        if len(self.layer_types) != self.num_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, num_hidden_layers is"
                f" {self.num_layers}"
            )
        method = (self.quantization_config or {}).get("quant_method")
        if self.quantization_config and not (isinstance(method, str) and method):
            raise ValueError(
                "quantization_config must name its quant_method, as in 'compressed-tensors' or"
                f" 'fp8', config.json says {shown(method)}"
            )
        window = self.swa_window_size
        if any(self.slides) and (type(window) is not int or not 1 <= window < LARGEST):
            raise ValueError(
                "a sliding layer needs dflash_config.swa_window_size or sliding_window,"
                f" config.json says {shown(window)}"
            )
        return self

    @property
    def slides(self) -> list[bool]:
        """Whether each layer has a window, resolved as vLLM's own DFlash model does."""
        slides = [kind == SLIDING for kind in self.layer_types]
        return [True] * len(slides) if self.use_swa and not any(slides) else slides

    def derived(self) -> dict[str, Any]:
        """Values that depend on several fields, by their names in `DrafterSpec`."""
        explicit = self.causal if self.is_causal is None else self.is_causal
        slides = [kind == SLIDING for kind in self.layer_types]
        return {
            "windows": tuple(self.swa_window_size if slide else None for slide in self.slides),
            # An explicit setting wins; otherwise the layers that slide by `layer_types` are causal.
            "causal": tuple(slide if explicit is None else explicit for slide in slides),
            "attention_sinks": self.attention_sink_bias,
            "quantization": (self.quantization_config or {}).get("quant_method"),
        }


AT_TOP_LEVEL = ("block_size", "draft_vocab_size", "target_hidden_size", "quantization_config")

ARCHITECTURE_BY_TYPE = {"dflash": ARCHITECTURE, "dflash2": ARCHITECTURE_2}
"""Architecture of each supported `speculators_model_type`."""


class Speculators(BaseModel):
    """Fields outside `transformer_layer_config` that z-lab's format writes differently."""

    model_config = ConfigDict(strict=True)

    transformer_layer_config: dict[str, Any] = described(..., "an object")
    aux_hidden_state_layer_ids: list[PositiveInt] = described(
        ..., "a list of numbers from 1 up (1: the first layer's output)", fail_fast=True
    )
    sliding_window_non_causal: bool = flag(True)


def as_zlab(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Recognise the dialect of a `config.json`, and translate it to z-lab's format.

    Returns the dialect's name and the fields; in z-lab's own, `config` itself.

    Raises:
        ValueError: see `from_speculators`.
    """
    if config.get("speculators_model_type") is not None:
        return "speculators", from_speculators(config)
    return "z-lab", config


def from_speculators(config: dict[str, Any]) -> dict[str, Any]:
    """Translate a speculators config to z-lab's format.

    Its tap numbers count the embedding as 0, so they are one higher.

    Raises:
        ValueError: it is another kind of drafter, or one of its own fields is invalid.
    """
    kind = config["speculators_model_type"]
    if kind not in [*ARCHITECTURE_BY_TYPE]:  # a list, because JSON values may be unhashable
        hint = '; method "dspark" runs those' if kind == "dspark" else ""
        raise ValueError(
            "it is not a DFlash checkpoint: speculators_model_type is"
            f" {shown(kind)}, expected 'dflash' or 'dflash2'{hint}"
        )
    own = checked(Speculators, config)
    extra = DFlash2.model_fields if kind == "dflash2" else ()
    nested = {name: config.get(name) for name in extra} | {
        "mask_token_id": config.get("mask_token_id"),
        "target_layer_ids": [i - 1 for i in own.aux_hidden_state_layer_ids],
        "sample_from_anchor": config.get("sample_from_anchor"),
    }
    # The flag applies to sliding layers only: full ones are always trained bidirectional. vLLM 0.32
    # makes them causal too (vllm#56692); without `causal`, each layer's type decides.
    if own.sliding_window_non_causal:
        nested["causal"] = False
    return {
        **_with_one_rotation(own.transformer_layer_config),
        **{name: config[name] for name in AT_TOP_LEVEL if config.get(name) is not None},
        "architectures": [ARCHITECTURE_BY_TYPE[kind]],
        "dflash_config": nested,
    }


def _with_one_rotation(layers: dict[str, Any]) -> dict[str, Any]:
    """The layers' config with the rotation that the library trains them with.

    If the target rotates its layer types differently, the library uses the sliding layers' rotation
    for all drafter layers, whatever their type (`flatten_rope_parameters`). A config may still have
    the target's entries.
    """
    rope = layers.get("rope_parameters")
    if isinstance(rope, dict) and isinstance(rope.get(SLIDING), dict):
        return {**layers, "rope_parameters": rope[SLIDING]}
    return layers
