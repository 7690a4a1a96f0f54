"""`DrafterSpec`: everything the rest of the package knows about a drafter checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

ARCHITECTURE = "DFlashDraftModel"
"""What a drafter's `config.json` says it is; under this name vLLM finds our draft model."""
ARCHITECTURE_2 = "DFlash2DraftModel"
"""What that of a DFlash 2 drafter says, which is ours as well."""
ARCHITECTURES = (ARCHITECTURE, ARCHITECTURE_2)


class DrafterError(ValueError):
    """A drafter that cannot be used. The message names the field, both values and the remedy."""


@dataclass(frozen=True)
class DFlash2:
    """What a DFlash 2 drafter has beside the layers of DFlash, under the names of its config."""

    conv_kernel_size: int
    """Rows of the block that each convolution reads: a row itself and those before it."""
    conv_group_size: int
    """Channels that share what a row adds to the kernel."""
    selector_rank: int
    """Numbers of the codes that tokens have as predecessors and as successors."""
    selector_top_k: int
    """Candidates for each place of the block."""
    input_embedding_scale: float = 1.0
    """Factor on embeddings as they are stored, whatever the target does to its own."""
    output_multiplier: float = 1.0
    """Factor on the head's logits, whatever the target does to its own."""
    final_logit_softcapping: float | None = None


@dataclass(frozen=True)
class DrafterSpec:
    """A DFlash drafter, whatever dialect its checkpoint is written in.

    Nothing downstream of the checkpoint reader looks at the raw config again.
    """

    model: str
    """Folder or repository the checkpoint was read from."""
    dialect: str
    """Which way of writing the config this was, for messages."""
    block_size: int
    """B: one bonus token and B - 1 mask tokens."""
    mask_token_id: int
    taps: tuple[int, ...]
    """0-based target layers whose OUTPUT is the drafter's context (HF `hidden_states[i + 1]`),
    in ascending order, which is the order of the columns of `fc.weight`."""
    target_hidden_size: int
    num_target_layers: int | None
    """Layers of the target it was trained for, where the checkpoint says so."""
    vocab_size: int
    """Of the target: ids that drafts are made of, and the mask token's."""
    draft_vocab_size: int
    """Rows of the drafter's own head; a smaller vocabulary comes with a map to the target's."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    attention_bias: bool
    rope_parameters: dict[str, Any]
    """As transformers 5 writes it: `rope_type`, `rope_theta` and the type's own fields."""
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens; None attends to the whole context."""
    causal: tuple[bool, ...]
    """Whether each layer's attention is causal inside the block; DFlash's own is not."""
    attention_sinks: bool = False
    """Whether each head has a logit of its own that attention may go to instead of any key."""
    value_scale: float | None = None
    """Factor on all values, of the context as well as of the block."""
    logit_scale: float = 1.0
    """Factor on the logits of the drafter's own head; a shared head is the target's, as it is."""
    is_neox_style: bool = True
    """Whether rotation pairs the two halves of a head, or else neighbouring numbers."""
    sliding_rope_parameters: dict[str, Any] | None = None
    """Of the layers with a window, where those are rotated otherwise than the full ones."""
    dflash2: DFlash2 | None = None
    """None for a drafter of the first DFlash."""
    quantization: str | None = None
    """How weights are quantised, as vLLM names it; None where they are plain numbers."""
    length_heads: tuple[str, ...] = ()
    """AdaFlash: modules of the checkpoint that are not loaded (`adaflash.py`)."""
    remarks: tuple[str, ...] = field(default=(), compare=False)
    """What a user should know of the config, though it can be read."""

    @property
    def max_draft_tokens(self) -> int:
        """K at most: one row of the block is the bonus token."""
        return self.block_size - 1

    @property
    def needs_own_vocabulary(self) -> bool:
        """Whether the target's embedding and head are of another size and cannot serve."""
        return self.hidden_size != self.target_hidden_size

    def rope_of(self, number: int) -> dict[str, Any]:
        """Rotary settings of the layer of this number."""
        if self.sliding_rope_parameters is None or self.windows[number] is None:
            return self.rope_parameters
        return self.sliding_rope_parameters

    def leaves_out(self, tensor: str) -> bool:
        """Whether a tensor of the checkpoint, by name, is not loaded."""
        return tensor.startswith(tuple(f"{head}." for head in self.length_heads))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, to travel to the workers; inverse of `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> DrafterSpec:
        """Rebuild a spec from `to_dict`, also after a trip through JSON."""
        names = ("taps", "windows", "causal", "length_heads", "remarks")
        read: dict[str, Any] = {name: tuple(fields[name]) for name in names}
        if fields["dflash2"] is not None:
            read["dflash2"] = DFlash2(**fields["dflash2"])
        return cls(**{**fields, **read})
