"""The step with the best rate: which requests get a block, and how many drafts are verified.

The best step is the one with the largest product of its requests' speeds (proportional fairness:
Kelly, Maulloo, Tan 1998, doi:10.1057/palgrave.jors.2600523): a draft is worth its time if it makes
its own request faster by more than it makes all of them slower. A request with C expected accepted
drafts writes 1 + C tokens in a step, so the utility of a draft is what it adds to log(1 + C). That
falls along a draft, since survival does: the n drafts worth most are always prefixes of requests'
drafts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.step import Plan


class Batch(NamedTuple):
    """R requests to plan for."""

    context_lens: Ints
    """Tokens of context, [R]."""
    max_drafts: Ints
    """Most drafts of a block that each can use, [R]."""
    waiting: Ints
    """Context rows of each that must be stored before it can be drafted, [R]."""
    texts: Floats
    """Utility of what their texts predict, [R, F]."""
    blocks: Floats
    """Utility that is expected of their blocks, [R, K]."""

    @property
    def size(self) -> int:
        """Number of requests, R."""
        return len(self.max_drafts)

    @property
    def context(self) -> float:
        """Tokens of context of all together."""
        return float(self.context_lens.sum())


def utility_of(survival: Floats) -> Floats:
    """Return the utility of each draft, from the survival of a request's drafts, [..., K] both."""
    tokens = 1.0 + survival.cumsum(axis=-1)
    return np.log1p(survival / (tokens - survival))


def rate_of(num_requests: int, utility: Floats | float, seconds: Floats | float) -> Floats:
    """Return the rate of steps: R times the geometric mean of their requests' tokens per second."""
    return num_requests * np.exp(utility / num_requests) / seconds


def first_best(values: Floats) -> int:
    """Return where the largest of N values is; of those that rounding may have set apart, the
    first. Ranks decide separately, perhaps on processors whose logarithms differ in the last bit.
    """
    best = values.max()
    return int(np.argmax(values >= best - 1e-9 * max(abs(best), 1.0)))


def best_first(
    costs: StepCosts, utility: Floats, context_lens: Ints, utility_per_second: float
) -> tuple[Ints, Floats, Floats]:
    """Order the drafts of R requests by utility. The best n are always prefixes of requests'
    drafts, so only n has to be searched, and the result is exact for the rows.

    Args:
        costs: costs of steps.
        utility: utility of the drafts, falling, [R, w].
        context_lens: tokens of context of the requests, [R].
        utility_per_second: what reading a context again for one more draft must bring.

    Returns:
        Each draft's request, the best draft first, [N]; the utility of the first n, and the seconds
        of a step that verifies them, [N + 1].
    """
    count, width = utility.shape
    net = utility - utility_per_second * costs.attention.draft * context_lens[:, None]
    order = np.argsort(-net, axis=None, kind="stable")[: int((net > 0.0).sum())]
    requests = order // max(width, 1)
    gain, reading = np.zeros((2, len(order) + 1))
    np.cumsum(utility.ravel()[order], out=gain[1:])
    np.cumsum(context_lens[requests], out=reading[1:])
    rows = count + np.arange(len(order) + 1)
    return requests, gain, costs.target(count, rows, float(context_lens.sum()), reading)


def best_lengths(
    batch: Batch,
    utility: Floats,
    otherwise: Plan,
    costs: StepCosts,
    drafting: float,
    uniform_lengths: Ints,
    ragged_seconds: float,
) -> Plan:
    """Return the best of steps in which each request has its own draft length, or all the same.

    Args:
        batch: R requests.
        utility: utility of their drafts, falling, [R, w].
        otherwise: a plan without these drafts.
        costs: costs of steps.
        drafting: seconds of the step's blocks.
        uniform_lengths: lengths that all requests can be given, [C].
        ragged_seconds: extra time of a step whose requests have other lengths.
    """
    count, width = utility.shape
    requests, gain, seconds = best_first(
        costs, utility, batch.context_lens, otherwise.utility_per_second
    )
    seconds = seconds + drafting + ragged_seconds
    rates = rate_of(count, gain, seconds)
    best = first_best(rates)
    rate, time = float(rates[best]), float(seconds[best])
    lengths = np.bincount(requests[:best], minlength=count)
    if len(uniform_lengths):
        same = np.minimum(uniform_lengths[:, None], batch.max_drafts)  # [C, R]
        gain = _summed(utility)[np.arange(count), np.minimum(same, width)].sum(axis=1)
        rows, reading = count + same.sum(axis=1), same @ batch.context_lens
        seconds = costs.target(count, rows, batch.context, reading) + drafting
        rates = rate_of(count, gain, seconds)
        best = first_best(rates)
        if rates[best] >= rate or (lengths == same[best]).all():
            lengths, rate, time = same[best], float(rates[best]), float(seconds[best])
    return replace(otherwise, lengths=lengths, utility_per_second=count / time, rate=rate)


def best_drafted(costs: StepCosts, batch: Batch, free: Plan, widths: Ints, most: int) -> Plan:
    """Return the best of steps in which some requests get a block: for each width, those who gain
    most by it, and as many of them as pay.

    Args:
        costs: costs of steps.
        batch: R requests.
        free: the best step without a block, whose texts' drafts the other requests have.
        widths: widths of blocks, [K].
        most: most requests to draft.
    """
    count, request = batch.size, np.arange(batch.size)
    lengths = np.minimum(widths, batch.max_drafts[:, None])  # [R, K]
    of_text = _summed(batch.texts)[request, free.lengths]
    gain = _summed(batch.blocks)[request[:, None], lengths] - of_text[:, None]
    # Those first who gain most beyond what reading their contexts takes.
    reading = costs.attention.draft * lengths + costs.attention.block
    net = gain - free.utility_per_second * reading * batch.context_lens[:, None]
    net[batch.max_drafts == 0] = -np.inf
    order = np.argsort(-net, axis=0, kind="stable")[: min(most, int((batch.max_drafts > 0).sum()))]
    gains = of_text.sum() + np.take_along_axis(gain, order, 0).cumsum(axis=0)  # [m, K]
    more = np.take_along_axis(lengths - free.lengths[:, None], order, 0)
    lens, number = batch.context_lens[order], np.arange(1, len(order) + 1)[:, None]
    rows = count + free.lengths.sum() + more.cumsum(axis=0)
    of_drafts = free.lengths @ batch.context_lens + (more * lens).cumsum(axis=0)
    seconds = costs.target(count, rows, batch.context, of_drafts)
    waiting = batch.waiting[order].cumsum(axis=0)
    seconds = seconds + costs.blocks(number, widths, lens.cumsum(axis=0), waiting)
    rates = rate_of(count, gains, seconds)
    best, width = divmod(first_best(rates.ravel()), len(widths))
    drafted = np.zeros(count, bool)
    drafted[order[: best + 1, width]] = True
    return replace(
        free,
        drafted=drafted,
        width=int(widths[width]),
        lengths=np.where(drafted, lengths[:, width], free.lengths),
        utility_per_second=count / float(seconds[best, width]),
        rate=float(rates[best, width]),
    )


def seconds_of(costs: StepCosts, batch: Batch, plan: Plan) -> float:
    """Return the seconds of a step, of its block, and of storing the context that needs."""
    verified, read = int(plan.lengths.sum()), float(plan.lengths @ batch.context_lens)
    seconds = costs.target(batch.size, batch.size + verified, batch.context, read)
    if plan.runs_block:
        each = np.ones_like(batch.waiting), batch.context_lens, batch.waiting
        count, context, waiting = (int(one[plan.drafted].sum()) for one in each)
        seconds = seconds + costs.blocks(count, plan.width, context, waiting)
    return float(seconds)


def perfect_rate(costs: StepCosts, batch: Batch) -> float:
    """Return the best rate of a step whose blocks, for one request or for all, were accepted in
    full: no drafter does better."""
    some, widths = np.array([[1], [batch.size]]), np.arange(1, 1 + batch.blocks.shape[1])
    drafts, context = some * widths, some * batch.context / batch.size
    seconds = costs.target(batch.size, batch.size + drafts, batch.context, widths * context)
    seconds = seconds + costs.blocks(some, widths, context)
    return float(rate_of(batch.size, some * np.log1p(widths), seconds).max())


def _summed(utility: Floats) -> Floats:
    """Return the utility of each request's first n drafts, [R, w + 1]."""
    found = np.zeros((len(utility), utility.shape[1] + 1))
    utility.cumsum(axis=1, out=found[:, 1:])
    return found
