"""Measure look-ups of free drafts: microseconds for a request and step.

    scripts/run.sh python benchmarks/look_ups.py

The text is vLLM's source, in tokens of the demo pair, one more at a time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import vllm
from transformers import AutoTokenizer

from demo_models import DEMO
from vllm_dflash.planning.step import StepRecord
from vllm_dflash.planning.texts import NgramIndex
from vllm_dflash.tools.console import print_report
from vllm_dflash.tools.tables import Table

STEPS, MOST = 500, 32


def read_text(tokens: int) -> list[int]:
    """Return `tokens` tokens of source code."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    text: list[int] = []
    for path in sorted(Path(vllm.__file__).parent.glob("v1/**/*.py")):
        text += tokenizer.encode(path.read_text())
        if len(text) >= tokens:
            break
    return text[:tokens]


def measure(text: list[int], context: int, num_requests: int) -> tuple[float, float, float]:
    """Return microseconds of a look-up: the mean, the 99th percentile, and the first."""
    tokens = context + STEPS + MOST
    matches = NgramIndex(num_requests)
    texts = np.zeros((num_requests, tokens), np.int32)
    texts[:, :context] = text[:context]
    ids = [str(number) for number in range(num_requests)]
    produced, limits = np.ones(num_requests, np.int64), np.full(num_requests, texts.shape[1])
    times = []
    for step in range(STEPS):
        record = StepRecord(ids, produced, context_lens=np.full(num_requests, context + step))
        sampled = np.full((num_requests, 1), text[context + step], np.int32)
        started = time.perf_counter()
        matches.look_up(record, texts, sampled, limits, MOST)
        times.append((time.perf_counter() - started) * 1e6 / num_requests)
        texts[:, context + step] = sampled[:, 0]
    return statistics.fmean(times[1:]), float(np.percentile(times[1:], 99)), times[0]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 32768, 131072])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32])
    arguments = parser.parse_args()
    text = read_text(max(arguments.contexts) + STEPS)
    rows = []
    for context in arguments.contexts:
        for count in arguments.requests:
            found = measure(text, context, count)
            times = (f"{one:.1f}" for one in found)
            rows.append([str(context), str(count), *times])
    columns = ["tokens of context", "requests", "mean us", "99th percentile us", "first us"]
    print_report([Table("A look-up, of one request", columns, rows)])


if __name__ == "__main__":
    main()
