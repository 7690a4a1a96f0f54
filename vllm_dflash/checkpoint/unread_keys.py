"""Keys of a drafter's config and overrides that nothing reads, and the nearest known ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_dflash.checkpoint.dialects import ONLY_NESTED, Speculators, ZlabConfig
from vllm_dflash.checkpoint.refusal import nearest
from vllm_dflash.checkpoint.spec import DrafterSpec

LENGTH_HEADS = ("thresh_head_two_model", "thresh_head_subsequent", "prob_head")
"""Length heads of AdaFlash drafters: DFlash drafters with a small head on their last hidden states,
which predicts how many drafts are worth verifying. The drafts are the same without it, so these
modules are not loaded."""
ABOUT_LENGTH_HEADS = ("thresh_head_", "use_thresh_head_", "prob_head_", "use_prob_head")
"""Prefixes of the keys of `dflash_config` that configure such a head."""
ROTARY = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
"""Fields of z-lab's format that only `rope.py` reads."""


def unread_overrides(spec: DrafterSpec, overrides: Mapping[str, Any]) -> list[str]:
    """Say what is wrong with each override whose name nothing reads."""
    extra = _names(type(spec.lilicorr or spec.dflash2))
    in_nested = _names(ZlabConfig) | extra | {f"use_{head}" for head in LENGTH_HEADS}
    at_top = _names(ZlabConfig).difference(ONLY_NESTED) | {*ROTARY, "architectures"}
    if spec.dialect == "speculators":
        at_top |= _names(Speculators) | extra | {"sample_from_anchor"}
    known = at_top | {f"dflash_config.{name}" for name in in_nested}
    written = [name for name in overrides if name != "dflash_config"]
    written += [f"dflash_config.{name}" for name in overrides.get("dflash_config") or {}]
    faults = []
    for name in written:
        if name not in known:
            last = name.removeprefix("dflash_config.")
            moved = {last, f"dflash_config.{last}"} & known
            near = moved.pop() if moved else nearest(name, known)
            faults.append(f"nothing reads {name!r}" + (f", did you mean {near!r}?" if near else ""))
    return faults


def remarks_on_keys(
    nested: dict[str, Any], length_heads: Sequence[str], besides: type[Any]
) -> list[str]:
    """Remarks on AdaFlash's heads, and on each key of `dflash_config` that is ignored.

    `besides`: class of the extra fields that this kind of drafter has.
    """
    remarks = []
    if length_heads:
        remarks.append(
            f"AdaFlash: its length head ({', '.join(length_heads)}) is not run, because vllm-dflash"
            " plans draft lengths itself"
        )
    read = _names(ZlabConfig) | _names(besides)
    for key in sorted(nested.keys() - read):
        if not (length_heads and key.startswith(ABOUT_LENGTH_HEADS)):
            near = nearest(key, read)
            hint = f"; did its author mean {near!r}?" if near else ""
            remarks.append(f"dflash_config has {key!r}, which is ignored{hint}")
    return remarks


def _names(kind: type[Any]) -> set[str]:
    """Names by which the fields of this class are written; empty for other classes."""
    return {field.alias or name for name, field in getattr(kind, "model_fields", {}).items()}
