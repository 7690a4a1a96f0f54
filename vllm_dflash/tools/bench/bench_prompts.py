"""Prompts of a benchmark: in the order of a round, easy and hard to draft for, or very long."""

from __future__ import annotations

import random
from collections.abc import Sequence


def in_order_of_round(prompts: Sequence[str], round_number: int) -> list[str]:
    """The prompts in an order that is this round's own."""
    order = list(prompts)
    random.Random(f"order {round_number}").shuffle(order)
    return order


def easy_and_hard(prompts: Sequence[str]) -> list[str]:
    """Every other prompt with its words shuffled: text that no drafter can foresee."""
    return [
        prompt if number % 2 == 0 else _words_shuffled(prompt)
        for number, prompt in enumerate(prompts)
    ]


def _words_shuffled(prompt: str) -> str:
    words = prompt.split()
    random.Random(prompt).shuffle(words)
    return " ".join(words)


def long_texts(prompts: Sequence[str], count: int) -> list[str]:
    """All prompts one after the other, so many times, beginning with another one each time."""
    starts = (len(prompts) * number // count for number in range(count))
    return ["\n".join([*prompts[start:], *prompts[:start]]) for start in starts]


def cut_to(tokens: Sequence[int], length: int) -> list[int]:
    """So many tokens: the first ones, or all of them over and over."""
    return (list(tokens) * -(-length // len(tokens)))[:length]
