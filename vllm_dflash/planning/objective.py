"""What draft lengths are planned for: the speed of the batch, or of each of its requests.

    throughput    maximise the sum of the requests' speeds: tokens per second of the batch
    fair          maximise their product (proportional fairness: Kelly, Maulloo, Tan 1998,
                  doi:10.1057/palgrave.jors.2600523)

A request with C expected accepted drafts writes 1 + C tokens in a step. So the worth of a draft is
what it adds to C, or to log(1 + C). Both fall along a draft, since survival does, so the n drafts
worth most are always prefixes of requests' drafts, and one search serves both objectives.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from vllm_dflash.planning import Floats

Number = TypeVar("Number", float, Floats)


def worth_of(survival: Floats, fair: bool) -> Floats:
    """Worth of each draft, from the survival of a request's drafts, [..., K] both."""
    if not fair:
        return survival
    tokens = 1.0 + survival.cumsum(axis=-1)
    return np.log1p(survival / (tokens - survival))


def rate_of(num_requests: int, worth: Number, seconds: Number, fair: bool) -> Number:
    """Rate of a step: R times the mean speed of its requests, in tokens per second.

    The mean is the arithmetic one, which makes that the tokens per second of the batch, or with
    `fair` the geometric one.
    """
    if fair:
        return num_requests * np.exp(worth / num_requests) / seconds
    return (num_requests + worth) / seconds


def price_of(num_requests: int, rate: float, seconds: float, fair: bool) -> float:
    """Worth that one more second must bring, in a step of this rate that takes so many seconds.

    The step that maximises worth less its price is the one with the best rate (Dinkelbach's rule
    for ratios; for the logarithm, its tangent).
    """
    return num_requests / seconds if fair else rate


def first_best(values: Floats) -> int:
    """Return where the largest of N values is; of those that rounding may have set apart, the
    first. Ranks decide separately, perhaps on processors whose logarithms differ in the last bit.
    """
    best = values.max()
    return int(np.argmax(values >= best - 1e-9 * max(abs(best), 1.0)))
