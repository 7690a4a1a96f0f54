"""What a user may write in `--speculative-config` for DFlash, and what it comes to."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

ADDITIONAL_CONFIG_KEY = "vllm_dflash"
"""Where the resolved options travel inside vLLM's `additional_config`."""

DRAFT_LENGTHS = ("adaptive", "fixed")
OWN_KEYS = {"draft_length", "drafter_overrides"}
"""Options of ours that vLLM does not know and must not see."""

WITHOUT_MEANING = {
    "disable_padded_drafter_batch": "rejected rows never reach the drafter anyway",
    "use_local_argmax_reduction": "the target's own head function gives whole rows of logits",
    "use_heterogeneous_vocab": "a DFlash drafter shares the target's vocabulary",
    "num_speculative_tokens_per_batch_size": "set num_speculative_tokens instead",
}
"""vLLM options that vllm-dflash refuses when they are set, and why."""


@dataclass(frozen=True)
class DFlashOptions:
    """The resolved options of one engine, as its workers read them."""

    num_speculative_tokens: int
    """K: drafted tokens per request and step at most."""
    draft_length: str
    """`adaptive`: planned every step, from 0 to K. `fixed`: K."""
    drafter: DrafterSpec
    drafter_ranks: int = 1
    """Tensor-parallel ranks that the drafter's layers are split over; 1: each has them whole."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form for `additional_config`; inverse of `from_dict`."""
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "draft_length": self.draft_length,
            "drafter": self.drafter.to_dict(),
            "drafter_ranks": self.drafter_ranks,
        }

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> DFlashOptions:
        """The options a worker was started with."""
        return cls.from_dict(vllm_config.additional_config[ADDITIONAL_CONFIG_KEY])

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> DFlashOptions:
        """Rebuild the options from `to_dict`."""
        return cls(**{**fields, "drafter": DrafterSpec.from_dict(fields["drafter"])})


def written_options(engine_args: EngineArgs) -> dict[str, Any]:
    """A copy of the user's speculative config, with the underscores that vLLM turns dashes into."""
    config = engine_args.speculative_config or {}
    return {key.replace("-", "_"): value for key, value in config.items()}


def check_keys(speculative_config: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse unknown options, naming the nearest known one, and options without meaning here.

    Raises:
        ValueError: with a message that says what to write instead.
    """
    for key, value in speculative_config.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = (
                f"; did you mean {near[0]!r}?" if near else f". Known: {', '.join(sorted(known))}."
            )
            raise ValueError(f"unknown option {key!r} in the speculative config{hint}")
        if value and key in WITHOUT_MEANING:
            raise ValueError(f"remove {key!r} from the speculative config: {WITHOUT_MEANING[key]}.")


def resolve_num_speculative_tokens(asked: int | None, drafter: DrafterSpec) -> int:
    """K: what the user asked for, else all the drafter was trained for.

    Raises:
        DrafterError: K is no positive integer, or larger than the drafter's block allows.
    """
    if asked is None:
        return drafter.max_draft_tokens
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise DrafterError(f"num_speculative_tokens must be a positive integer, not {asked!r}.")
    if asked > drafter.max_draft_tokens:
        raise DrafterError(
            f"num_speculative_tokens is {asked}, but drafter {drafter.model!r} was trained with"
            f" block_size {drafter.block_size}: one bonus token and {drafter.max_draft_tokens}"
            " drafted ones. Rows beyond its block are positions it never learned, so they would"
            " cost verification and be rejected. Ask for at most"
            f" {drafter.max_draft_tokens}, or leave num_speculative_tokens out."
        )
    return asked


def resolve_draft_length(asked: object) -> str:
    """`adaptive` unless the user asked otherwise.

    Raises:
        ValueError: neither of the two.
    """
    if asked is None:
        return DRAFT_LENGTHS[0]
    if asked not in DRAFT_LENGTHS:
        raise ValueError(
            f"draft_length must be one of {', '.join(map(repr, DRAFT_LENGTHS))}, not {asked!r}:"
            " 'adaptive' plans the length of every draft, down to none where drafting does not"
            " pay; 'fixed' always drafts num_speculative_tokens."
        )
    return str(asked)


def resolve_drafter_overrides(asked: object) -> Mapping[str, Any]:
    """Fields that stand in for those of the drafter's `config.json`. Raises `ValueError`."""
    if asked is None:
        return {}
    if not isinstance(asked, Mapping):
        raise ValueError(
            f"drafter_overrides must be an object with fields of the drafter's config.json, for"
            f' example {{"sliding_window": 2048}}, not {asked!r}.'
        )
    return asked


def fill_in_defaults(
    engine_args: EngineArgs, options: DFlashOptions, verification: Mapping[str, Any]
) -> None:
    """Write into the user's speculative config what vLLM needs and DFlash knows."""
    config = {**written_options(engine_args), **verification}
    for key in OWN_KEYS:
        config.pop(key, None)
    if engine_args.spec_method is None:
        config["method"] = "dflash"
    if engine_args.spec_tokens is None:
        config["num_speculative_tokens"] = options.num_speculative_tokens
    # vLLM checks for itself that a drafter divides.
    config["draft_tensor_parallel_size"] = options.drafter_ranks
    if config.get("draft_sample_method") == "probabilistic":
        warn_about_sampling()
        config["draft_sample_method"] = "greedy"
    # A prefix-cache hit restores the drafter's context with the target's, block by block: unlike
    # EAGLE's, its rows are not shifted by one token, so the last block need not be dropped.
    config.setdefault("disable_eagle_block_drop", True)
    engine_args.speculative_config = config


def warn_about_sampling() -> None:
    """Say why drafts are not sampled."""
    from vllm.logger import init_logger

    init_logger("vllm.dflash").warning(
        "draft_sample_method 'probabilistic' is ignored: DFlash predicts each position without"
        " knowing the ones before it, so sampling them independently ruins acceptance. Drafts"
        " stay at the most likely token, which is lossless at any temperature."
    )
