"""`DrafterSpec`: everything the rest of the package knows about a drafter checkpoint."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, Strict

from vllm_dflash.checkpoint.refusal import LARGEST, described, flag, integer, positive

ARCHITECTURE = "DFlashDraftModel"
"""Architecture of DFlash drafters; vLLM finds our draft model under this name."""
ARCHITECTURE_2 = "DFlash2DraftModel"
"""Architecture of DFlash 2 drafters."""
ARCHITECTURE_LILICORR = "LiLiCorrDraftModel"
"""Architecture of LiLiCorr drafters."""
ARCHITECTURES = (ARCHITECTURE, ARCHITECTURE_2, ARCHITECTURE_LILICORR)
ROTARY_TABLES = (
    *(f"rotary_emb.{table}" for table in ("inv_freq", "cos_cached", "sin_cached")),
    "rotary_pos_emb.inv_freq",
)
"""Parts of the names of tables that are computed anyway."""
CACHE_SCALES = (
    *(f".{kind}_{what}" for kind in "qkv" for what in ("scale", "zero_point")),
    ".kv_scale",
    ".g_idx",
)
"""Suffixes of tensors that quantised checkpoints may have, and that are not loaded."""
MOST_LAYERS = 1024
MOST_ROWS = 1024
"""Largest block."""
MOST_POSITIONS = 1 << 22


class DrafterError(ValueError):
    """A drafter that cannot be used. The message names the field, both values and the remedy."""


class DFlash2(BaseModel):
    """Settings that a DFlash 2 drafter has in addition to DFlash's, named as in its config."""

    model_config = ConfigDict(strict=True, frozen=True)

    conv_kernel_size: int = integer(most=1024)
    """Rows of the block that each convolution reads: the row itself and earlier ones."""
    conv_group_size: int = integer()
    """Channels that share a row's correction of the kernel."""
    selector_rank: int = integer()
    """Length of a token's codes as predecessor and as successor."""
    selector_top_k: int = integer(most=1024)
    """Candidates for each position of the block."""
    input_embedding_scale: float = positive(1.0)
    """Factor on stored embeddings, independent of the target's own scaling."""
    output_multiplier: float = positive(1.0)
    """Factor on the head's logits, independent of the target's own scaling."""
    final_logit_softcapping: float | None = described(None, "a number from 0", ge=0, lt=LARGEST)


class LiLiCorr(BaseModel):
    """Settings that a LiLiCorr drafter has in addition to DFlash's (arXiv 2608.20530).

    In its config, names begin with `lilicorr_`, except those of the convolutions.
    """

    model_config = ConfigDict(strict=True, frozen=True, validate_by_name=True)

    enabled: bool = flag(True, alias="lilicorr_enabled")
    candidate_topk: int = integer(most=16, alias="lilicorr_candidate_topk")
    """Candidates for each position of the block; a power of two."""
    hidden_size: int = integer(0, least=0, alias="lilicorr_hidden_size")
    """Width of the head's layers; 0 means the drafter's hidden size."""
    num_layers: int = integer(most=MOST_LAYERS, alias="lilicorr_num_layers")
    num_heads: int = integer(alias="lilicorr_num_heads")
    mlp_ratio: float = positive(alias="lilicorr_mlp_ratio")
    """Rows of the layers' MLPs, as a multiple of `hidden_size`."""
    factor_dim: int = integer(alias="lilicorr_factor_dim")
    """Length of the vectors whose cosine scores how well one token follows another."""
    vector_eps: float = positive(alias="lilicorr_vector_eps")
    logit_scale: float = positive(alias="lilicorr_logit_scale")
    """Factor that turns cosines into logits."""
    conv_kernel_size: int = integer(0, least=0, most=1024)
    """See `DFlash2`; 0 disables convolutions."""
    conv_group_size: int = integer(0, least=0)

    @property
    def mlp_size(self) -> int:
        """Rows of each layer's MLP."""
        return int(self.hidden_size * self.mlp_ratio)


class DrafterShape(BaseModel):
    """Values that each come from one field of a checkpoint's config, under its name or alias.

    Defaults apply if the config leaves the field out.
    """

    model_config = ConfigDict(strict=True, frozen=True, validate_by_name=True)

    block_size: int = integer(least=2, most=MOST_ROWS)
    """B: one bonus token and B - 1 mask tokens."""
    mask_token_id: int = integer(least=0)
    taps: Annotated[tuple[NonNegativeInt, ...], Strict(False)] = described(
        ...,
        f"a list of 1 to {MOST_LAYERS} layer numbers",
        alias="target_layer_ids",
        min_length=1,
        max_length=MOST_LAYERS,
        fail_fast=True,
    )
    """0-based target layers whose OUTPUT is the drafter's context (HF `hidden_states[i + 1]`),
    in ascending order, which is the order of the columns of `fc.weight`."""
    hidden_size: int = integer()
    target_hidden_size: int = integer(lambda read: read["hidden_size"])
    num_target_layers: int | None = integer(None)
    """Layers of the target it was trained for, if the checkpoint says so."""
    vocab_size: int = integer()
    """Size of the target's vocabulary; drafts and the mask token use its ids."""
    draft_vocab_size: int = integer(lambda read: read["vocab_size"])
    """Rows of the drafter's own head; a smaller vocabulary comes with a map to the target's."""
    intermediate_size: int = integer()
    num_layers: int = integer(most=MOST_LAYERS, alias="num_hidden_layers")
    num_heads: int = integer(alias="num_attention_heads")
    num_kv_heads: int = integer(lambda read: read["num_heads"], alias="num_key_value_heads")
    head_dim: int = integer(lambda read: read["hidden_size"] // read["num_heads"])
    hidden_act: Literal["silu"] = described(
        "silu", "'silu', the only one that vLLM's gated MLP has"
    )
    rms_norm_eps: float = positive(1e-6)
    attention_bias: bool = flag(False)
    max_position_embeddings: int = integer(32768, most=MOST_POSITIONS)
    is_neox_style: bool = flag(True)
    """Whether rotation pairs the two halves of a head; otherwise it pairs neighbouring numbers."""
    logit_scale: float = positive(1.0)
    """Factor on the logits of the drafter's own head; not applied to the target's head."""
    value_scale: float | None = positive(None, alias="attention_value_scale")
    """Factor on the attention values of context and block."""
    sample_from_anchor: bool = flag(False)
    """Whether each row of a block predicts the token after its own, the bonus token's row too.
    Otherwise mask rows predict their own tokens."""


class DrafterSpec(DrafterShape):
    """Everything we know about a DFlash drafter, independent of its checkpoint's dialect.

    Only the checkpoint reader uses the raw config. Sent to the workers as JSON.
    """

    model: str
    """Folder or repository the checkpoint was read from."""
    dialect: str
    """Format of the config, for messages."""
    rope_parameters: dict[str, Any]
    """RoPE in transformers 5's format: `rope_type`, `rope_theta` and the type's own fields."""
    base_is_assumed: bool = False
    """Whether the config does not state `rope_theta`."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens by the checkpoint; None: the full context."""
    draft_window: int | None = None
    """Largest window that the user gives any layer; None: as the checkpoint says."""
    causal: tuple[bool, ...]
    """Whether each layer's attention is causal inside the block; in DFlash itself it is not."""
    attention_sinks: bool = False
    """Whether each head has a sink: a logit that attention may go to instead of any key."""
    dflash2: DFlash2 | None = None
    """None for other drafters."""
    lilicorr: LiLiCorr | None = None
    """None for other drafters."""
    quantization: str | None = None
    """vLLM's name of the quantisation method; None if weights are not quantised."""
    length_heads: tuple[str, ...] = ()
    """AdaFlash modules in the checkpoint, which are not loaded."""
    remarks: tuple[str, ...] = ()
    """Warnings about a config that can be read, for the user."""

    @property
    def max_draft_tokens(self) -> int:
        """Largest K: the rows of the block that predict."""
        return self.block_size - self.first_draft_row

    @property
    def first_draft_row(self) -> int:
        """Row of a block that predicts its first draft: a block of K drafts has so many rows more
        than K."""
        return 0 if self.sample_from_anchor else 1

    @property
    def convolutions(self) -> DFlash2 | LiLiCorr | None:
        """Settings with the shape of the sublayers' convolutions; None if there are none."""
        if self.lilicorr is not None:
            return self.lilicorr if self.lilicorr.conv_kernel_size else None
        return self.dflash2

    @property
    def num_candidates(self) -> int | None:
        """Candidates for each position; None if each draft is simply the argmax."""
        if self.lilicorr is not None:
            return self.lilicorr.candidate_topk
        return None if self.dflash2 is None else self.dflash2.selector_top_k

    @property
    def needs_own_vocabulary(self) -> bool:
        """Whether the target's embedding and head have another size and cannot be shared."""
        return self.hidden_size != self.target_hidden_size

    @property
    def positions_go_on(self) -> bool:
        """Whether positions beyond `max_position_embeddings` only need longer rotary tables, so
        that longer requests can be drafted; True for the same types as in vLLM 0.33."""
        return self.rope_parameters["rope_type"] in ("default", "linear", "llama3")

    def layer_window(self, number: int) -> int | None:
        """Tokens that layer `number` attends to, the query's own included; None: all."""
        limits = self.windows[number], self.draft_window
        return min((limit for limit in limits if limit is not None), default=None)

    def leaves_out(self, tensor: str) -> bool:
        """Whether the checkpoint's tensor of this name is not loaded.

        Those are length heads, and what vLLM's own loader drops: tables that are computed anyway,
        maps of the target's tokens, scales of another cache, and the order and zero biases that
        GPTQ writes for every layer.
        """
        if tensor.startswith(tuple(f"{head}." for head in self.length_heads)):
            return True
        if any(table in tensor for table in ROTARY_TABLES) or tensor.endswith("t2d"):
            return True
        is_bias = tensor.startswith("layers.") and tensor.endswith("_proj.bias")
        has_bias = self.attention_bias and ".self_attn." in tensor
        return self.quantization is not None and (
            tensor.endswith(CACHE_SCALES) or (is_bias and not has_bias)
        )
