"""What draft lengths are planned for: the speed of the batch, or of each of its requests.

    throughput    maximise the sum of the requests' speeds: tokens per second of the batch
    fair          maximise their product (proportional fairness: Kelly, Maulloo, Tan 1998,
                  doi:10.1057/palgrave.jors.2600523)

Either way a step of R requests has a value per second, R times the mean of the requests' speeds:
the arithmetic mean, or the geometric one. A request with C expected accepted drafts writes 1 + C
tokens. So the worth of a draft is what it adds to C, or to log(1 + C). Both fall along a draft,
since survival does, so the n drafts worth most are always prefixes of requests' drafts, and one
search serves both: every choice between steps is `fastest`, or `worthiest` where a price is known.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numba.extending import register_jitable

from vllm_dflash.planning import Floats

Number = TypeVar("Number", float, Floats)


def worth_of(survival: Floats, fair: bool) -> Floats:
    """Worth of each draft, from the survival of a request's drafts, [..., K] both."""
    if not fair:
        return survival
    tokens = 1.0 + survival.cumsum(axis=-1)
    return np.log1p(survival / (tokens - survival))


def scaled(worth: float, ratios: Floats, num_requests: int, fair: bool) -> Floats:
    """Worth of drafts if `ratios` times as many were accepted, of all requests alike, [S]."""
    if fair:
        return num_requests * np.log1p(ratios * np.expm1(worth / num_requests))
    return worth * ratios


@register_jitable  # compiled where a compiled function calls it
def rate_of(num_requests: int, worth: Number, seconds: Number, fair: bool) -> Number:
    """Rate of a step: R times the mean speed of its requests, in tokens per second.

    The mean is the arithmetic one, which makes that the tokens per second of the batch, or with
    `fair` the geometric one.
    """
    if fair:
        return num_requests * np.exp(worth / num_requests) / seconds
    return (num_requests + worth) / seconds


@register_jitable
def price_of(num_requests: int, rate: float, seconds: float, fair: bool) -> float:
    """Worth that one more second must bring, in a step of this rate that takes so many seconds."""
    return num_requests / seconds if fair else rate


@register_jitable
def first_best(values: Floats) -> int:
    """Return where the largest of N values is; of those that rounding may have set apart, the
    first. Ranks decide separately, perhaps on processors whose logarithms differ in the last bit.
    """
    best = values.max()
    return int(np.argmax(values >= best - 1e-9 * max(abs(best), 1.0)))


@register_jitable
def fastest(num_requests: int, worth: Floats, seconds: Floats, fair: bool) -> tuple[int, float]:
    """Return which of N steps of R requests has the best rate, and that rate.

    Args:
        num_requests: R.
        worth: worth of the drafts that each step verifies, [N].
        seconds: time of each step, [N].
        fair: the objective.
    """
    rates = rate_of(num_requests, worth, seconds, fair)
    best = first_best(rates)
    return best, rates[best]


@register_jitable
def worthiest(worth: Floats, seconds: Floats, price: float) -> int:
    """Return which of N steps is worth most if a second must bring `price` (`price_of`).

    At the price of the fastest step, that is the fastest step (Dinkelbach's rule for ratios; for
    the logarithm, its tangent).
    """
    return first_best(worth - price * seconds)
