"""What the config of a DFlash 2 drafter says beside that of a DFlash one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from vllm_dflash.checkpoint.refusal import LARGEST, checked, described, positive, whole
from vllm_dflash.checkpoint.spec import DFlash2
from vllm_dflash.checkpoint.zlab import ZlabConfig


class DFlash2Config(BaseModel):
    """Read in `dflash_config` alone, as vLLM does: at top level, fields are the target's."""

    model_config = ConfigDict(strict=True)

    conv_kernel_size: int = whole(most=1024)
    conv_group_size: int = whole()
    selector_rank: int = whole()
    selector_top_k: int = whole(most=1024)
    input_embedding_scale: float = positive(1.0)
    output_multiplier: float = positive(1.0)
    final_logit_softcapping: float | None = described(None, "a number from 0", ge=0, lt=LARGEST)


def read_dflash2(
    nested: Mapping[str, Any], layers: ZlabConfig, refuse: Callable[[str], Exception]
) -> DFlash2:
    """Read the fields of `dflash_config`, which have to go together with the layers'."""
    own = {name: nested.get(name) for name in DFlash2Config.model_fields}
    fields = checked(DFlash2Config, own, refuse, inside="dflash_config")
    if layers.hidden_size % fields.conv_group_size:
        raise refuse(
            f"conv_group_size ({fields.conv_group_size}) must divide hidden_size"
            f" ({layers.hidden_size})"
        )
    if layers.draft_vocab_size != layers.vocab_size:
        raise refuse(
            f"draft_vocab_size is {layers.draft_vocab_size} and vocab_size {layers.vocab_size}: a"
            " DFlash 2 drafter chooses among all tokens of its target, so they must be equal"
        )
    if fields.selector_top_k > layers.vocab_size:
        raise refuse(
            f"selector_top_k ({fields.selector_top_k}) must not exceed vocab_size"
            f" ({layers.vocab_size})"
        )
    cap = fields.final_logit_softcapping or None  # 0 means none, as in vLLM
    return DFlash2(**{**fields.model_dump(), "final_logit_softcapping": cap})
