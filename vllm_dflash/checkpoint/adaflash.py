"""AdaFlash's length heads: known by their names, and left out.

An AdaFlash drafter is a DFlash drafter with a small head on its last hidden states, which guesses
how many of the drafts are worth verifying. The drafts are the same without it.
"""

from __future__ import annotations

from typing import Any

SETTING = ("thresh_head_", "use_thresh_head_", "prob_head_", "use_prob_head")
"""How keys of `dflash_config` begin that are about such a head."""


def length_heads(nested: dict[str, Any]) -> tuple[str, ...]:
    """Which of them this `dflash_config` says there are, by the name of their tensors."""
    heads = ("thresh_head_two_model", "thresh_head_subsequent", "prob_head")
    return tuple(head for head in heads if nested.get(f"use_{head}") is True)


def remarks_on(heads: tuple[str, ...]) -> tuple[str, ...]:
    """What a user should know of a drafter with these heads."""
    if not heads:
        return ()
    named = ", ".join(heads)
    return (
        f"AdaFlash, whose length head ({named}) is not run: draft lengths are planned by"
        " vllm-dflash anyway",
    )
