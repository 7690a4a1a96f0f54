"""`DFlashOptions`: what one engine was started with, on its way to the workers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from vllm_dflash.checkpoint.spec import DrafterSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ADDITIONAL_CONFIG_KEY = "vllm_dflash"
"""Where the options travel inside vLLM's `additional_config`, as one string of JSON: part of the
key of the compile cache, and hashable, so that a process parses it once."""


@dataclass(frozen=True)
class DFlashOptions:
    """The resolved options of one engine, as its workers read them."""

    num_speculative_tokens: int
    """Drafts per request and step at most, whoever made them: what vLLM has room for."""
    draft_width: int
    """K: drafts of the drafter's block at most."""
    draft_length: str
    """`adaptive`: planned every step, from 0 to K. `fixed`: K."""
    drafter: DrafterSpec
    drafter_ranks: int = 1
    """Tensor-parallel ranks that the drafter's layers are split over; 1: each has them whole."""
    most_free: int = 0
    """Drafts of a request and step at most that its text predicts; 0: none are looked up."""
    shares_outputs: bool = False
    """Whether they are looked up in what others were answered lately as well."""
    may_trim: bool = True
    """Whether vLLM's adaptive verification may be turned on: not if the user turned it off."""
    estimates_folder: str | None = None
    """Where to keep what was learned; None: nowhere."""
    runner: str = "v1"
    """vLLM's model runner: on `v1` the host plans, on `v2` the device decides."""

    @property
    def is_planned(self) -> bool:
        """Whether draft lengths are planned."""
        return self.draft_length == "adaptive"

    @property
    def free_drafts(self) -> bool:
        """Whether to look up what a request's text predicts."""
        return self.most_free > 0

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> DFlashOptions:
        """The options an engine was started with.

        Raises:
            RuntimeError: it was started without vllm-dflash.
        """
        additional = vllm_config.additional_config
        written = additional.get(ADDITIONAL_CONFIG_KEY) if isinstance(additional, dict) else None
        if written is None:
            raise RuntimeError(
                "vllm-dflash's draft model or worker runs here, but the front end that started this"
                " engine did not select it, so it has no options: there, install the same version"
                " of vllm-dflash, and leave VLLM_PLUGINS unset or add 'dflash' to it; its log says"
                " so if the plugin was loaded and could not be placed."
            )
        return from_json(written)

    def to_json(self) -> str:
        """To travel in `additional_config`; inverse of `from_json`."""
        return json.dumps(asdict(self), sort_keys=True)


@lru_cache(maxsize=16)
def from_json(written: str) -> DFlashOptions:
    """Rebuild the options from `to_json`."""
    fields = json.loads(written)
    return DFlashOptions(**{**fields, "drafter": DrafterSpec.from_dict(fields["drafter"])})
