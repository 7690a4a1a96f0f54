"""vLLM's own schedule of draft lengths, one K for each number of requests, as good as it gets."""

from __future__ import annotations

from collections.abc import Mapping


def tuned_ranges(rates: Mapping[int, Mapping[int, float]]) -> list[list[int]]:
    """(first, last, K) of `num_speculative_tokens_per_batch_size`: the fastest K of each.

    `rates`: tokens per second by number of requests and K, 0 being plain decoding. A K holds from
    its number of requests to the next one; vLLM takes the last K for all beyond.
    """
    counts = sorted(rates)
    firsts = [1, *counts[1:]]
    lasts = [*(first - 1 for first in firsts[1:]), counts[-1]]
    fastest = (max(rates[count], key=rates[count].__getitem__) for count in counts)
    return [[*one] for one in zip(firsts, lasts, fastest, strict=True)]
