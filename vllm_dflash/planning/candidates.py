"""Which drafted tokens to verify: exact, over any forest of candidates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_dflash.planning import Bools, Floats, Ints


@dataclass(frozen=True)
class Candidates:
    """Tokens that could be verified, each behind its parent; a chain has one child each.

    Parents come before their children. A token is accepted only if its parent is, so survival
    never grows from parent to child.
    """

    request: Ints
    """Row of the request each belongs to, [C]."""
    parent: Ints
    """Candidate each stands behind; -1 for the bonus token, [C]."""
    survival: Floats
    """Probability that the token and all before it are accepted, [C]."""

    @classmethod
    def chains(cls, survival: Floats, lengths: Ints) -> Candidates:
        """One chain per request: survival by position [D, w], of which `lengths` [D] count."""
        inside = np.arange(survival.shape[1]) < lengths[:, None]  # [D, w]
        request, position = np.nonzero(inside)
        parent = np.where(position > 0, np.arange(len(request)) - 1, -1)
        return cls(request, parent, survival[inside])


def select(candidates: Candidates, seconds: Floats, price: float) -> Bools:
    """The set of candidates whose expected tokens are most worth their time.

    Maximises `sum(survival) - price * seconds[count]` over all sets that hold the parent of each
    member. With price the best rate that can be had (tokens per second), this is the set that
    attains it (Dinkelbach's rule for ratios), and what was already spent on drafting is sunk.

    A token never survives better than its parent, so the best set of n candidates is the n
    largest survivals, and only n has to be searched.

    Args:
        candidates: C of them.
        seconds: time of a step that verifies 0 to C of them, [C + 1].
        price: expected tokens a second is worth.

    Returns:
        Chosen or not, [C].
    """
    survival = candidates.survival
    best_first = np.sort(survival)[::-1]
    worth = np.concatenate([[0.0], np.cumsum(best_first)]) - price * seconds
    count = int(worth.argmax())
    if count == 0:
        return np.zeros(len(survival), dtype=bool)
    least = best_first[count - 1]
    chosen = survival > least
    # Among equals the first ones: a parent comes before the child that survives as well as it.
    chosen[np.flatnonzero(survival == least)[: count - int(chosen.sum())]] = True
    return chosen
