"""Host processor time of a step: plain decoding, vLLM's own DFlash, and ours.

    scripts/run.sh python benchmarks/host_time.py            # 2 minutes

Runs on the emulated GPU, where a launch takes the host longer than on a real one. The device's work
is done while the host waits, and that time does not count. Where a GPU is faster than its host, a
step takes as long as this. Planning is as rare as it is for steps of milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo_models import DEMO, DFLASH, HELD_OUT
from vllm_dflash.tools.bench.sides import NO_PLUGIN, OURS, PLAIN, PLUGIN
from vllm_dflash.tools.console import print_report
from vllm_dflash.tools.tables import Table

ROOT = Path(__file__).parent.parent
NATIVE = "native K=7"
STEPS = 20


def measure(side: str, count: int) -> float:
    """Return milliseconds of a step with `count` requests. Runs in its own process."""
    sys.path.insert(0, str(ROOT / "tests"))
    from emulated import vllm_side

    vllm_side.use()
    from vllm import LLM, SamplingParams
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    speculative: dict[str, Any] | None = DFLASH
    if side == PLAIN:
        speculative = None
    elif side == NATIVE:
        speculative = {**DFLASH, "num_speculative_tokens": 7}
    else:
        plan_as_on_a_fast_gpu()
    waited = [0.0]
    time_the_waits(AsyncOutput, "get_output", waited)
    if side == OURS:
        from vllm_dflash.engine.v2.exchange import HostCopy

        time_the_waits(HostCopy, "wait", waited)
    llm = LLM(
        str(DEMO / "target"),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=count,
        max_num_batched_tokens=16 * max(count, 4),
        kv_cache_memory_bytes=32 << 20,
        gpu_memory_utilization=0.5,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8 * count],
        },
        speculative_config=speculative,
    )
    engine = llm.llm_engine
    lines = HELD_OUT.read_text().splitlines()[:count]
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    taken: list[float] = []
    for turn in range(2):  # the first one warms up
        for number, line in enumerate(lines):
            engine.add_request(f"{turn}-{number}", json.loads(line)["prompt"], params)
        for step in range(8 + STEPS):
            began = time.thread_time() - waited[0]
            engine.step()
            if turn and step >= 8:
                taken.append(time.thread_time() - waited[0] - began)
        while engine.has_unfinished_requests():
            engine.step()
    return 1000 * sorted(taken)[len(taken) // 2]


def plan_as_on_a_fast_gpu() -> None:
    """Make blocks always pay, and planning as rare as on a GPU with very short steps."""
    import pytest

    from support.engines import fix_costs
    from vllm_dflash.planning import cadence

    is_due = cadence.Cadence.is_due
    fix_costs(pytest.MonkeyPatch())
    cadence.Cadence.is_due = is_due  # type: ignore[method-assign]
    cadence.MOST_TIME = 1e-9


def time_the_waits(owner: type, name: str, waited: list[float]) -> None:
    """Add the time that a method takes to `waited`."""
    method: Callable[..., Any] = getattr(owner, name)

    def timed(*args: Any) -> Any:
        began = time.thread_time()
        try:
            return method(*args)
        finally:
            waited[0] += time.thread_time() - began

    setattr(owner, name, timed)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.side:
        print(measure(parsed.side, *parsed.requests))
        return
    rows = []
    for count in parsed.requests:
        found = []
        for side in (PLAIN, NATIVE, OURS):
            plugins = {"VLLM_PLUGINS": PLUGIN if side == OURS else NO_PLUGIN}
            command = [sys.executable, __file__, "--side", side, "--requests", str(count)]
            said = subprocess.check_output(command, env=os.environ | plugins, text=True)
            found.append(float(said.splitlines()[-1]))
        rows.append([str(count), *(f"{one:.1f}" for one in found)])
    print_report(
        [Table("Milliseconds of the host a step", ["requests", PLAIN, NATIVE, OURS], rows)]
    )


if __name__ == "__main__":
    main()
