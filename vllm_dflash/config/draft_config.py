"""vLLM's own reading of a drafter's `config.json`: kept from harm, mended, and blamed by name.

vLLM and transformers read the file once more, by rules of their own, for a config that our code
asks for little. What our code needs is in `DrafterSpec`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from vllm_dflash.checkpoint.dialects import from_speculators
from vllm_dflash.checkpoint.refusal import shown, without_frame
from vllm_dflash.checkpoint.spec import ARCHITECTURE, DrafterError, DrafterSpec

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs


Read = Callable[["EngineArgs"], "SpeculativeConfig | None"]

OWN_LENGTH = "max_model_len"
"""Key in the `dflash_config` of vLLM's copy: tokens of the longest request that is drafted."""


def read_by_vllm(
    read: Read,
    engine_args: EngineArgs,
    target: ModelConfig,
    drafter: DrafterSpec,
    config: dict[str, Any],
) -> SpeculativeConfig:
    """vLLM's own config of a drafter of ours.

    `trust_remote_code` is off while vLLM reads: it hands the target's setting down to the drafter,
    whose `auto_map` could then name a file of its folder to be imported. A DFlash drafter is data:
    no code of its checkpoint is of use to us.

    Args:
        read: what vLLM makes it with.
        engine_args: what vLLM makes it of.
        target: vLLM's config of it.
        drafter: as we have read it.
        config: its `config.json`.

    Raises:
        DrafterError: vLLM cannot read the drafter's config; names the field.
    """
    asked = copy.copy(engine_args)  # which vLLM writes into
    asked.speculative_config = dict(engine_args.speculative_config)
    trusted, target.trust_remote_code = target.trust_remote_code, False
    try:
        speculative_config = read(engine_args)
    except Exception as error:  # whatever vLLM and transformers trip over in a config
        fault = config_fault(drafter, config, asked, read)
        if fault is None:
            raise
        raise fault from error
    finally:
        target.trust_remote_code = trusted
    return describe_to_vllm(speculative_config, drafter)


def describe_to_vllm(config: SpeculativeConfig, drafter: DrafterSpec) -> SpeculativeConfig:
    """Say in vLLM's copy of the draft config what vLLM itself reads there, in its own words.

    Taps and mask token, which checkpoints keep in several places. And `layer_types`: vLLM refuses
    drafters that mix sliding and full layers on the V1 runner for needing several cache groups;
    ours keeps all layers in one and takes its windows from `DrafterSpec`. And the architectures of
    DFlash 2 and LiLiCorr, which vLLM refuses on V1: our draft model is all three. And the drafter's
    length: where positions do not go on, vLLM 0.33 cuts the target's limit down to it on V2; ours
    leaves longer requests undrafted.
    """
    draft = config.draft_model_config
    length = draft.max_model_len
    draft.max_model_len = max(length, config.target_model_config.max_model_len)
    if drafter.positions_go_on and config.max_model_len is None:  # which is the user's
        length = draft.max_model_len
    draft.model_arch_config.architectures = [ARCHITECTURE]
    for hf_config in (draft.hf_config, draft.hf_text_config):
        hf_config.architectures = [ARCHITECTURE]
        nested = dict(getattr(hf_config, "dflash_config", None) or {})
        nested |= {"mask_token_id": drafter.mask_token_id, "target_layer_ids": list(drafter.taps)}
        nested[OWN_LENGTH] = length
        hf_config.dflash_config = nested
        if getattr(hf_config, "layer_types", None):
            hf_config.layer_types = ["full_attention"] * len(hf_config.layer_types)
    return config


def drafted_length(draft: ModelConfig) -> int:
    """Tokens of the longest request that this drafter drafts."""
    return draft.hf_config.dflash_config[OWN_LENGTH]


def config_fault(
    drafter: DrafterSpec,
    config: dict[str, Any],
    engine_args: EngineArgs,
    read: Read,
) -> DrafterError | None:
    """What to raise instead of an error of vLLM's, if the drafter's config has caused it.

    Found out by trial: vLLM reads a plain config of the same drafter, with everything else as it
    was. Where that fails, too, the cause is elsewhere. Else the drafter's fields are put into the
    plain config one by one, until one fails; at last, all of them together.

    Args:
        drafter: as we have read it.
        config: its `config.json`.
        engine_args: as they were given to vLLM.
        read: what failed.

    Returns:
        None where the cause is not in the config.
    """

    def failure(fields: dict[str, Any]) -> Exception | None:
        with TemporaryDirectory(prefix="dflash-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(fields))
            trial = copy.copy(engine_args)
            trial.spec_model = None
            trial.speculative_config = {**(engine_args.speculative_config or {}), "model": folder}
            trial.speculative_config.pop("revision", None)
            try:
                read(trial)
            except Exception as failed:
                return failed
        return None

    # Nothing in it but what such a drafter must have.
    sizes = {"vocab_size", "hidden_size", "intermediate_size", "head_dim"}
    sizes |= {"num_layers", "num_heads", "num_kv_heads", "max_position_embeddings"}
    plain = drafter.model_dump(include=sizes, by_alias=True)
    plain |= {"architectures": [ARCHITECTURE], "model_type": "qwen3"}
    if failure(plain) is not None:
        return None
    fields = config
    if config.get("speculators_model_type") is not None:
        fields = from_speculators(config)
    trials = [
        ({**plain, name: value}, f"{name} of config.json, which is {shown(value)}")
        for name, value in fields.items()
    ]
    for trial, what in [*trials, (config, "config.json")]:  # last, fields that do not go together
        if failed := failure(trial):
            why = without_frame(failed).removeprefix("Value error, ") or "no reason given"
            return DrafterError(
                f"drafter {drafter.model!r}: bad config: vLLM cannot read {what}: {why}"
                f" ({type(failed).__name__})"
            )
    return None
