"""The fields of a drafter's `config.json` as z-lab writes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vllm_dflash.checkpoint.refusal import flag, positive, shown, whole
from vllm_dflash.checkpoint.rope import MOST_POSITIONS

FULL, SLIDING = "full_attention", "sliding_attention"
MOST_LAYERS = 1024

ONLY_NESTED = {
    "causal",
    "causal_head",
    "sample_from_anchor",
    "swa_window_size",
    "use_swa",
}
"""Read in `dflash_config` alone: at top level they would be another model's."""
ONLY_AT_TOP = {
    "add_swa_attention_sink_bias",
    "dtype",
    "is_causal",
    "layer_types",
    "model_type",
    "quantization_config",
    "sliding_window",
    "torch_dtype",
}

UNSUPPORTED = (
    (
        "sample_from_anchor",
        True,
        "so its first row predicts as well; neither vllm-dflash nor vLLM's own DFlash runs such"
        " drafters",
    ),
    (
        "causal_head",
        True,
        "so it is a JetSpec drafter, whose head predicts each token from those before it; neither"
        " vllm-dflash nor vLLM 0.32 runs such drafters",
    ),
    (
        "use_aux_hidden_state",
        False,
        "so it reads the target's last hidden states instead of taps, which is not supported;"
        " VLLM_PLUGINS='' gives vLLM's own DFlash",
    ),
)
"""Fields that name another kind of drafter by a value, and what it is."""


class ZlabConfig(BaseModel):
    """All that is read of it but rotation, which has fields of its own (`rope.py`)."""

    model_config = ConfigDict(strict=True)

    block_size: int = whole(least=2, most=1024)
    mask_token_id: int = whole(least=0)
    target_layer_ids: list[Annotated[int, Field(ge=0)]] = Field(
        min_length=1,
        max_length=MOST_LAYERS,
        description=f"a non-empty list of at most {MOST_LAYERS} layer numbers",
    )
    target_hidden_size: int | None = whole(None)
    num_target_layers: int | None = whole(None)
    vocab_size: int = whole()
    draft_vocab_size: int | None = whole(None)
    hidden_size: int = whole()
    intermediate_size: int = whole()
    num_hidden_layers: int = whole(most=MOST_LAYERS)
    num_attention_heads: int = whole()
    num_key_value_heads: int | None = whole(None)
    head_dim: int | None = whole(None)
    hidden_act: Literal["silu"] = Field(
        "silu", description="'silu', which is all that vLLM's gated MLP has"
    )
    rms_norm_eps: float = positive(1e-6)
    attention_bias: bool = flag(False)
    max_position_embeddings: int = whole(32768, most=MOST_POSITIONS)
    is_neox_style: bool = flag(True)
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = Field(
        None, description=f"a list of {FULL!r} and {SLIDING!r}"
    )
    sliding_window: Any = None
    swa_window_size: Any = None
    """Both count, and are checked, only where a layer slides."""
    use_swa: bool = flag(False)
    is_causal: bool | None = flag(None)
    causal: bool | None = flag(None)
    causal_head: bool = flag(False)
    attention_sink_bias: bool | None = flag(None)
    add_swa_attention_sink_bias: bool = flag(False)
    attention_value_scale: float | None = positive(None)
    logit_scale: float = positive(1.0)
    sample_from_anchor: bool = flag(False)
    use_aux_hidden_state: bool = flag(True)

    # Read by transformers, which fails at anything else without naming it.
    model_type: str | None = Field(None, min_length=1, description="the name of a model type")
    dtype: str | dict[str, Any] | None = Field(None, min_length=1, description="a type's name")
    torch_dtype: str | dict[str, Any] | None = Field(
        None, min_length=1, description="a type's name"
    )
    quantization_config: dict[str, Any] | None = Field(None, description="an object")

    @field_validator("target_layer_ids")
    @classmethod
    def _ascending(cls, ids: list[int]) -> list[int]:
        # vLLM sorts and de-duplicates the layers it captures, so any other order would silently
        # feed each column block of fc.weight from another layer.
        if ids != sorted(set(ids)):
            raise ValueError("strictly ascending")
        return ids

    @model_validator(mode="before")
    @classmethod
    def _is_supported(cls, written: dict[str, Any]) -> dict[str, Any]:
        for name, value, why in UNSUPPORTED:
            if written.get(name) is value:
                raise ValueError(f"{name} is {str(value).lower()}, {why}")
        if isinstance(quantised := written.get("quantization_config"), dict) and quantised:
            raise ValueError("quantised drafters are not supported yet (quantization_config)")
        return written

    @model_validator(mode="after")
    def _is_consistent(self) -> ZlabConfig:
        if self.num_attention_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of"
                f" num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_size < 2 or self.head_size % 2:
            raise ValueError(f"head_dim must be even to be rotated, it is {self.head_size}")
        if len(self.types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.types)} layers, num_hidden_layers is"
                f" {self.num_hidden_layers}"
            )
        if any(self.sliding) and (type(self.window) is not int or not 1 <= self.window < 1 << 31):
            raise ValueError(
                "a sliding layer needs dflash_config.swa_window_size or sliding_window,"
                f" config.json says {shown(self.window)}"
            )
        return self

    @property
    def num_kv_heads(self) -> int:
        """As many as heads, unless it says otherwise."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """The hidden size shared out to the heads, unless it says otherwise."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def types(self) -> list[str]:
        """What `layer_types` says of each layer."""
        return [*self.layer_types] if self.layer_types else [FULL] * self.num_hidden_layers

    @property
    def sliding(self) -> list[bool]:
        """Whether each layer has a window, resolved as vLLM's own DFlash model does."""
        sliding = [kind == SLIDING for kind in self.types]
        return [True] * len(sliding) if self.use_swa and not any(sliding) else sliding

    @property
    def window(self) -> Any:
        """Tokens that a sliding layer looks back; checked where there is such a layer."""
        return self.sliding_window if self.swa_window_size is None else self.swa_window_size

    @property
    def causality(self) -> list[bool]:
        """Of each layer: an explicit setting wins, else only sliding layers are causal.

        Those that `layer_types` names: `use_swa` alone makes no layer causal.
        """
        explicit = self.causal if self.is_causal is None else self.is_causal
        return [kind == SLIDING if explicit is None else explicit for kind in self.types]
