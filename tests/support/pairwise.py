"""Few combinations of settings in which every two values of two settings meet (pairwise testing).

Most faults of combinations involve two settings. Twenty settings have millions of combinations;
a dozen are enough for every two to meet.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

Value = tuple[str, str]
"""A setting and its value."""
Pair = frozenset[Value]
TRIES = 50
"""Tries for each combination; the one with most new pairs is taken."""


def pair(one: Value, other: Value) -> Pair:
    """Return two values of two settings, in either order."""
    return frozenset((one, other))


def all_pairs(settings: Mapping[str, Sequence[str]]) -> set[Pair]:
    """Return every two values of two settings."""
    values = [[(name, value) for value in found] for name, found in settings.items()]
    return {
        pair(one, other)
        for some, others in combinations(values, 2)
        for one in some
        for other in others
    }


def pairs_of(combination: Mapping[str, str]) -> set[Pair]:
    """Return the pairs that meet in a combination."""
    return {pair(*two) for two in combinations(combination.items(), 2)}


def covering(
    settings: Mapping[str, Sequence[str]], excluded: Collection[Pair] = (), seed: int = 0
) -> list[dict[str, str]]:
    """Return combinations in which all pairs meet except the excluded ones; the same every time.

    Greedy: each has a pair that is still missing, and otherwise the values that bring most new
    pairs.

    Raises:
        ValueError: excluded pairs make another pair impossible.
    """
    dice = random.Random(seed)
    missing = all_pairs(settings) - set(excluded)
    found: list[dict[str, str]] = []
    while missing:
        first = min(missing, key=sorted)
        tries = [_complete(settings, excluded, first, missing, dice) for _ in range(TRIES)]
        best = max(
            (one for one in tries if one), key=lambda c: len(pairs_of(c) & missing), default=None
        )
        if best is None:
            raise ValueError(f"no combination has {sorted(first)}, and it is not excluded")
        missing -= pairs_of(best)
        found.append({name: best[name] for name in settings})
    return found


def _complete(
    settings: Mapping[str, Sequence[str]],
    excluded: Collection[Pair],
    first: Pair,
    missing: Collection[Pair],
    dice: random.Random,
) -> dict[str, str] | None:
    """Return a combination with a first pair, settings in random order; None if none is found."""
    chosen = dict(first)
    others = [name for name in settings if name not in chosen]
    dice.shuffle(others)
    for name in others:
        new = {
            value: [pair((name, value), one) for one in chosen.items()] for value in settings[name]
        }
        allowed = [value for value, pairs in new.items() if not any(p in excluded for p in pairs)]
        if not allowed:
            return None
        dice.shuffle(allowed)
        chosen[name] = max(allowed, key=lambda value: sum(p in missing for p in new[value]))
    return chosen
