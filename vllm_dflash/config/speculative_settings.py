"""Settings in `--speculative-config` for DFlash."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from vllm_dflash.checkpoint.refusal import LARGEST, checked, described, nearest
from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec
from vllm_dflash.vllms_own import OWN_KEYS

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

MOST_NODES = 64
"""Largest `draft_tree`."""
AUTO_NODES = 31
"""32 rows with the root, which fill the tiles of a tensor core (docs/engineering/trees.md)."""
IGNORED = {
    "disable_padded_drafter_batch": "rejected rows never reach the drafter anyway",
    "num_speculative_tokens_per_batch_size": "'draft_length' sets how long drafts are; 'adaptive'"
    " plans it in every step",
    "use_local_argmax_reduction": "drafts are chosen by their probability, which needs all logits",
}
"""vLLM options that have no effect here, and why: if set, they are removed with a warning."""


def _vllm_field(description: str, **bounds: Any) -> Any:
    """A field of vLLM's, which accepts "7" for 7."""
    return described(None, description, strict=False, **bounds)


Count = Annotated[
    int, BeforeValidator(lambda value: str(value) if isinstance(value, bool) else value)
]
"""A number in a field of vLLM's, which would take true for 1."""
OffInYAML = BeforeValidator(lambda value: "off" if value is False else value)
"""`vllm serve --config` reads YAML 1.1, in which `off` without quotes is false."""


class SpeculativeSettings(BaseModel):
    """Settings that we read; vLLM's other settings are passed on unchanged."""

    model_config = ConfigDict(strict=True)

    model: str = described(..., "the folder or the repository of a drafter")
    revision: str | None = described(None, "a revision of the drafter's repository")
    num_speculative_tokens: Count | None = _vllm_field("a positive integer", ge=1)
    draft_length: Literal["adaptive", "fixed"] = described(
        "adaptive",
        "'adaptive' (the length of every draft is planned, down to none if drafting does not"
        " pay) or 'fixed' (always num_speculative_tokens)",
    )
    draft_window: int | None = described(
        None,
        "a positive number of tokens that the drafter's layers attend to at most",
        ge=1,
        lt=LARGEST,
    )
    drafter_overrides: dict[str, Any] = described(
        {}, 'an object with fields of the drafter\'s config.json, as in {"sliding_window": 2048}'
    )
    free_drafts: Annotated[Literal["auto", "off"], OffInYAML] = described(
        "auto",
        "'auto' (if a request's text repeats itself, drafts are copied from it when they promise"
        " more than the drafter's) or 'off'",
    )
    draft_tree: Annotated[
        Literal["auto", "off"] | Annotated[int, Field(ge=1, le=MOST_NODES)], OffInYAML
    ] = described(
        "off",
        "'off' (one candidate for each position), 'auto' (with Model Runner V2, draft trees of up"
        f" to {AUTO_NODES} tokens or chains, whichever is fastest in each step) or another limit"
        f" for trees, up to {MOST_NODES}",
    )
    require: bool = described(
        False,
        "true (stop where this package cannot run the engine) or false (then vLLM's own DFlash"
        " runs it)",
    )
    draft_tensor_parallel_size: Count | None = _vllm_field("a positive integer", ge=1)
    enable_adaptive_verification: bool | None = _vllm_field("true or false")
    draft_sample_method: Literal["greedy", "probabilistic"] | None = described(
        None, "'probabilistic' (the default on Model Runner V2) or 'greedy'"
    )
    draft_load_config: Any = None
    """vLLM's settings for loading the drafter, as it checks them itself."""

    @classmethod
    def from_config(cls, written: Mapping[str, Any]) -> SpeculativeSettings:
        """Check the user's speculative config.

        Raises:
            ValueError: (`DrafterError` included) the message says what to write instead.
        """
        from vllm.config import SpeculativeConfig

        known = {*OWN_KEYS} | {field.name for field in dataclasses.fields(SpeculativeConfig)}
        for key in written:
            if key not in known:
                near = nearest(key, known)
                hint = f"; did you mean {near!r}?" if near else f". Known: {sorted(known)}."
                raise ValueError(f"unknown option {key!r} in the speculative config{hint}")
        if written.get("use_heterogeneous_vocab"):
            raise ValueError(
                "remove 'use_heterogeneous_vocab' from the speculative config: a DFlash drafter"
                " shares the target's vocabulary."
            )
        if not written.get("model"):
            raise DrafterError(
                "method 'dflash' needs a drafter: add 'model' to the speculative config, for"
                ' example {"method": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16"}.'
            )
        undrafted = " To serve without drafts, leave the whole speculative config out."
        remedy = undrafted if written.get("num_speculative_tokens") == 0 else ""
        try:
            return checked(cls, written, said="not {}")
        except ValueError as error:
            raise ValueError(f"{error}.{remedy}") from None

    def draft_tokens(self, drafter: DrafterSpec) -> int:
        """K: the number that the user asks for, at most what the drafter was trained for."""
        from vllm.logger import init_logger

        most = drafter.max_draft_tokens
        asked = self.num_speculative_tokens or most
        if asked > most:
            init_logger("vllm.dflash").warning_once(
                "num_speculative_tokens is %d, but at most %d tokens are drafted: drafter %r was"
                " trained with block_size %d%s.",
                asked,
                most,
                drafter.model,
                drafter.block_size,
                ", which includes the bonus token" if drafter.first_draft_row else "",
            )
        return min(asked, most)


def written_settings(engine_args: EngineArgs) -> dict[str, Any]:
    """A copy of the user's speculative config, with underscores for dashes, as in vLLM."""
    config = engine_args.speculative_config or {}
    return {key.replace("-", "_"): value for key, value in config.items()}


def requested_settings(engine_args: EngineArgs) -> dict[str, Any] | None:
    """The user's settings for DFlash, from the config or its flags; None for any other method."""
    requested = written_settings(engine_args)
    flags = {"method": "method", "model": "model", "num_speculative_tokens": "tokens"}
    for key, flag in flags.items():  # a vLLM may lack one
        value = getattr(engine_args, f"spec_{flag}", None)
        if value is not None:
            requested.setdefault(key, value)
    return requested if asks_for_dflash(requested) else None


def asks_for_dflash(requested: Mapping[str, Any]) -> bool:
    """Whether vLLM takes this speculative config for method `dflash`."""
    method, model = requested.get("method"), requested.get("model")
    return method == "dflash" or (method is None and _sounds_like_dflash(model))


def _sounds_like_dflash(model: Any) -> bool:
    """Whether vLLM infers method `dflash` from this drafter name."""
    from vllm.config import SpeculativeConfig

    name = str(model or "").lower()
    if "dflash" not in name or "eagle-" in name or "eagle3" in name:
        return False
    return not SpeculativeConfig._is_custom_proposer_path(model)
