"""What waiting context costs a load that is never drafted, once its ring is full.

    scripts/run.sh python benchmarks/waiting_context.py

The demo pair, widened to 203 M parameters, in bfloat16. 32 requests at a time, each with its own
prompt and 160 tokens. The planner is kept from drafting, so a context row is stored only because
its place in the ring is needed: the worst case. Prints the share of the time that storing takes.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # to reach into the engine
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "4"

from rich.progress import track
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from vllm_dflash.engine.v1.backlog import ContextBacklog
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Plan, StepRecord
from vllm_dflash.tools.bench.bench_pair import widened_demo
from vllm_dflash.tools.prompts import read_prompts

DEMO = Path(__file__).parents[1] / "models" / "demo"
REQUESTS, TOKENS = 32, 160
WARM_UP = 128
"""Requests until more rows have arrived than the ring holds."""
ROUNDS = 6


def never(planner: Planner, step: StepRecord) -> Plan:
    """A plan without drafts."""
    return Plan.without_block(step.num_requests, holds_for=7)


def main() -> None:
    """Fill the ring, then measure in rounds."""
    spent = 0.0
    store = ContextBacklog._store

    def timed_store(backlog: ContextBacklog, rows: Any) -> int:
        nonlocal spent
        started = time.perf_counter()
        stored = store(backlog, rows)
        spent += time.perf_counter() - started
        return stored

    mock.patch.object(Planner, "plan", never).start()
    mock.patch.object(ContextBacklog, "_store", timed_store).start()
    prompts = read_prompts(DEMO / "held_out.jsonl", 64)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=TOKENS,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    with tempfile.TemporaryDirectory() as folder:
        pair = widened_demo(DEMO, Path(folder))
        llm = LLM(
            pair.target,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=REQUESTS,
            speculative_config={"method": "dflash", "model": pair.drafter},
        )
    numbers = itertools.count()

    def run(count: int) -> None:
        mine = [
            f"# {number}\n{prompts[number % 64]}" for number in itertools.islice(numbers, count)
        ]
        llm.generate(mine, sampling, use_tqdm=False)

    run(WARM_UP)
    shares = []
    for _ in track(range(ROUNDS), "Measuring"):
        spent, started = 0.0, time.perf_counter()
        run(REQUESTS)
        shares.append(100 * spent / (time.perf_counter() - started))
    print(
        f"storing displaced context: {statistics.median(shares):.2f}% of the time"
        f" ({min(shares):.2f} to {max(shares):.2f}, {ROUNDS} rounds)"
    )


if __name__ == "__main__":
    main()
