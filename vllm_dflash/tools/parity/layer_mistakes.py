"""Mistakes that are made in a drafter's layers, each as a change of the reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_dflash.model.reference import ReferenceDrafter

THETAS = (10_000.0, 500_000.0, 1_000_000.0, 5_000_000.0, 10_000_000.0)
"""Bases that models are commonly trained with."""


@dataclass(frozen=True)
class Mistake:
    """A mistake and the reference that makes it."""

    cause: str
    made: AbstractContextManager[None]
    """While it is entered, the drafter makes the mistake."""
    block_shift: int = 0
    """What is added to the positions of the block's rows."""
    with_context: bool = True


def common_mistakes(drafter: ReferenceDrafter, number: int) -> Iterator[Mistake]:
    """Mistakes that a drafter's layer of this number could show, likely ones first."""
    spec = drafter.spec
    attentions = [layer.self_attn for layer in drafter.layers]
    pairs, halves = "neighbouring pairs", "halves"
    named = (halves, pairs) if spec.is_neox_style else (pairs, halves)
    yield Mistake(
        f"rope layout: the engine rotates {named[1]}, the checkpoint means {named[0]}",
        _set(attentions, "is_neox_style", not spec.is_neox_style),
    )
    yield from _rope_mistakes(drafter, number)
    yield Mistake("the block sees nothing of its context", nullcontext(), with_context=False)
    for shift in (1, -1):
        direction = "behind" if shift > 0 else "before"
        yield Mistake(
            f"positions: the block is one {direction} where its context ends",
            nullcontext(),
            block_shift=shift,
        )
    window, causal = spec.windows[number], spec.causal[number]

    def with_window(other: int | None) -> AbstractContextManager[None]:
        windows = (*spec.windows[:number], other, *spec.windows[number + 1 :])
        return _set([drafter], "spec", replace(spec, windows=windows))

    flipped = (*spec.causal[:number], not causal, *spec.causal[number + 1 :])
    yield Mistake(
        "causality: the checkpoint's attention in the block is causal, the engine's is not"
        if causal
        else "causality: the engine's attention in the block is causal, the checkpoint's is not",
        _set([drafter], "spec", replace(spec, causal=flipped)),
    )
    if window is not None:
        yield Mistake(
            f"window: the engine's attention has none, the checkpoint's is {window}",
            with_window(None),
        )
        for other in (window + 1, window - 1):
            yield Mistake(
                f"window: the engine's is {other}, the checkpoint's {window}",
                with_window(other),
            )
    if spec.value_scale is not None:
        yield Mistake(
            f"attention_value_scale ({spec.value_scale}) is not applied",
            _set(attentions, "value_scale", 1.0),
        )


def _rope_mistakes(drafter: ReferenceDrafter, number: int) -> Iterator[Mistake]:
    rope, slides = drafter.spec.rope_of(number), drafter.spec.windows[number] is not None
    rotary, of_others = drafter.rotary, drafter.sliding_rotary
    if slides:
        rotary, of_others = of_others, rotary
    if rotary is not of_others:
        kinds = ("full", "sliding") if slides else ("sliding", "full")
        yield Mistake(
            f"rope by layer type: the engine rotates this layer as {kinds[0]} ones, the checkpoint"
            f" means as {kinds[1]} ones",
            _rotated(rotary, of_others.inv_freq, of_others.attention_scaling),
        )
    theta, kind = float(rope["rope_theta"]), rope["rope_type"]
    rotated, head_dim = 2 * len(rotary.inv_freq), drafter.spec.head_dim
    if kind != "default":
        yield Mistake(
            f"rope scaling ({kind}) is not applied",
            _rotated(rotary, _frequencies(rotated, theta), 1.0),
        )
        return
    if rotated != head_dim:
        yield Mistake(
            f"partial_rotary_factor: the engine rotates all {head_dim} numbers of a head, the"
            f" checkpoint means {rotated}",
            _set([rotary], "inv_freq", _frequencies(head_dim, theta)),
        )
    for other in THETAS:
        if other != theta:
            yield Mistake(
                f"rope theta: the engine's is {other:g}, the checkpoint's {theta:g}",
                _set([rotary], "inv_freq", _frequencies(rotated, other)),
            )


def _frequencies(rotated: int, theta: float) -> torch.Tensor:
    return theta ** -(torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)


@contextmanager
def _rotated(rotary: Any, frequencies: torch.Tensor, scaling: float) -> Iterator[None]:
    with _set([rotary], "inv_freq", frequencies), _set([rotary], "attention_scaling", scaling):
        yield


@contextmanager
def _set(owners: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    owners = list(owners)
    before = [getattr(owner, name) for owner in owners]
    for owner in owners:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, old in zip(owners, before, strict=True):
            setattr(owner, name, old)
