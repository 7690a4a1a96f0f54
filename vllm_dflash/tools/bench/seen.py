"""What clients saw of requests: how many drafts were accepted, and how long they waited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm_dflash.tools.loads import token_seconds

POSITIONS = 8
"""Of a block, whose acceptance is told."""
SEEN = ["acceptance length", "accepted by position", "tokens/s"]
SEEN += ["TTFT", "p99", "TPOT", "p99", "ITL", "p99"]


def seen(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """In the order of `SEEN`; waits in ms.

    `records` have, of each request, by output, `seconds` since it came and `tokens`. The first
    output is the prompt's. Each one behind it is a step: accepted drafts, and the bonus token. ITL
    is the time between two outputs, as vLLM counts it; tokens/s are those of one request.
    """
    tokens = [sum(one["tokens"]) for one in records]
    steps = np.concatenate([one["tokens"][1:] for one in records])
    accepted = [(steps > number).mean() for number in range(1, POSITIONS + 1) if len(steps)]
    waits = [one["seconds"] for one in records]
    behind = token_seconds(waits, tokens)
    cells = [
        f"{steps.mean():.2f}" if len(steps) else "",
        " ".join(f"{part:.2f}" for part in accepted if part),
        f"{sum(tokens) / sum(waited[-1] for waited in waits):.1f}",
    ]
    for waited in ([one[0] for one in waits], behind, np.concatenate([*map(np.diff, waits)])):
        quantiles = 1000 * np.quantile(waited, [0.5, 0.99]) if len(waited) else []
        cells += [f"{one:.0f}" for one in quantiles] or ["", ""]
    return cells
