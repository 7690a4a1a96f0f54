"""vLLM's own reading of a drafter's `config.json`, made safe and corrected.

vLLM and transformers read the file again, by their own rules, into a config that our code hardly
uses. What our code needs is in `DrafterSpec`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm_dflash.checkpoint.refusal import cut_off, one_line
from vllm_dflash.checkpoint.spec import ARCHITECTURE, DrafterSpec

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs


Read = Callable[["EngineArgs"], "SpeculativeConfig | None"]

OWN_LENGTH = "max_model_len"
"""Key in the `dflash_config` of vLLM's copy: longest request that is drafted, in tokens."""

OF_MANY_KINDS = ("auto", "hf", "mistral", "npcache", "pt")
"""Load formats by which vLLM may read pickles, or `consolidated*.safetensors` instead of others."""


def read_by_vllm(
    read: Read,
    engine_args: EngineArgs,
    target: ModelConfig,
    drafter: DrafterSpec,
) -> SpeculativeConfig:
    """vLLM's own config of a drafter that we run.

    `trust_remote_code` is off while vLLM reads: vLLM passes the target's setting on to the drafter,
    whose `auto_map` could then name a file in its folder to import. A DFlash drafter is data: we
    need no code from its checkpoint.

    `read`: vLLM's function that makes the config of `engine_args`. What it raises is logged at
    ERROR and raised again.
    """
    from vllm.logger import init_logger

    limit = engine_args.speculative_config.get("max_model_len")
    is_beyond = (
        drafter.positions_go_on
        and isinstance(limit, int)
        and limit > drafter.max_position_embeddings
    )
    if is_beyond:  # vLLM would refuse it
        del engine_args.speculative_config["max_model_len"]
    trusted, target.trust_remote_code = target.trust_remote_code, False
    try:
        speculative_config = read(engine_args)
    except Exception as error:  # of many types, and often without the name of a file or field
        init_logger("vllm.dflash").error(
            "vLLM cannot read the speculative config, or the config.json of drafter %r: %s (%s)",
            drafter.model,
            cut_off(one_line(error)) or "no reason given",
            type(error).__name__,
        )
        raise
    finally:
        target.trust_remote_code = trusted
    assert speculative_config is not None
    if is_beyond:
        speculative_config.max_model_len = limit
    load_safetensors(speculative_config, engine_args)
    return describe_to_vllm(speculative_config, drafter)


def describe_to_vllm(config: SpeculativeConfig, drafter: DrafterSpec) -> SpeculativeConfig:
    """Correct the fields that vLLM itself reads in its copy of the draft config.

    - Taps and mask token, which checkpoints keep in several places.
    - `sample_from_anchor`, which vLLM refuses on V2. Ours takes it from `DrafterSpec`.
    - `layer_types`: on V1, vLLM refuses drafters that mix sliding and full layers, because they
      need several cache groups. Ours keeps all layers in one group and takes its windows from
      `DrafterSpec`.
    - The architectures of DFlash 2 and LiLiCorr, which vLLM refuses on V1. Our draft model
      implements all three.
    - The drafter's length: unless `positions_go_on`, vLLM 0.33 lowers the target's limit to it on
      V2. Ours does not draft for longer requests instead.
    """
    draft = config.draft_model_config
    length = draft.max_model_len
    draft.max_model_len = max(length, config.target_model_config.max_model_len)
    if drafter.positions_go_on:
        length = min(config.max_model_len or draft.max_model_len, draft.max_model_len)
    draft.model_arch_config.architectures = [ARCHITECTURE]
    for hf_config in (draft.hf_config, draft.hf_text_config):
        hf_config.architectures = [ARCHITECTURE]
        nested = dict(getattr(hf_config, "dflash_config", None) or {})
        nested |= {"mask_token_id": drafter.mask_token_id, "target_layer_ids": list(drafter.taps)}
        nested[OWN_LENGTH] = length
        nested.pop("sample_from_anchor", None)
        hf_config.dflash_config = nested
        if getattr(hf_config, "eagle_aux_hidden_state_layer_ids", None):  # vLLM looks there first
            hf_config.eagle_aux_hidden_state_layer_ids = [tap + 1 for tap in drafter.taps]
        if getattr(hf_config, "layer_types", None):
            hf_config.layer_types = ["full_attention"] * len(hf_config.layer_types)
    return config


def load_safetensors(config: SpeculativeConfig, engine_args: EngineArgs) -> None:
    """Let vLLM load a drafter from `*.safetensors` only, and if there is an index, from the files
    that it names."""
    from vllm.model_executor.model_loader.utils import get_draft_load_config
    from vllm.transformers_utils.runai_utils import is_runai_obj_uri

    if config.draft_load_config is None and is_runai_obj_uri(
        config.target_model_config.model_weights
    ):
        return  # "auto" becomes "runai_streamer", which reads nothing else
    engine: Any = SimpleNamespace(
        speculative_config=config, load_config=engine_args.create_load_config()
    )
    loading = get_draft_load_config(engine)
    if loading.load_format in OF_MANY_KINDS:
        config.draft_load_config = replace(loading, load_format="safetensors")


def drafted_length(draft: ModelConfig) -> int:
    """Length of the longest request that this drafter drafts for, in tokens."""
    return draft.hf_config.dflash_config[OWN_LENGTH]
