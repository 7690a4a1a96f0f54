"""Host processor time of a step: plain decoding, vLLM's own DFlash, and ours, measured in turns.

    scripts/run.sh python benchmarks/host_time.py                             # 15 minutes
    scripts/run.sh python benchmarks/host_time.py --requests 1 --rounds 4     # does it work?

Runs on the emulated GPU, where a launch takes the host longer than on a real one. Where a GPU is
faster than its host, a step takes as long as this. All engines are up at once and take turns, so
the ratios of a round are of the same moment: they hold on a busy machine, and times do not.

The device does next to nothing. Triton's kernels are launched and not run, a graph's replay is one
launch, and what the device would send is made up: 3 tokens of each request in a step with drafts,
else 1. So the host never waits. Our plans are forced, and made as seldom as for steps of
milliseconds. Engines take at least 4 requests: for fewer, ours captures no graph of steps that
verify no drafts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypedDict

import numpy as np
from engine_child import EngineChild

from demo_models import DEMO, DFLASH
from vllm_dflash.tools.bench.sides import NO_PLUGIN, OURS, PLAIN, PLUGIN
from vllm_dflash.tools.console import print_report, terminable
from vllm_dflash.tools.progress import Progress, progress_on
from vllm_dflash.tools.server import temporary_logs
from vllm_dflash.tools.tables import Table

NATIVE, UNDRAFTED = "native K=7", "ours without blocks"
SIDES = {PLAIN: 1, NATIVE: 2, OURS: 2, UNDRAFTED: 2}
"""How many graphs each side is to replay in a step."""
RATIOS = ((OURS, NATIVE), (UNDRAFTED, PLAIN), (NATIVE, PLAIN))
WIDTH, TOKENS = 7, 3
"""K, and tokens of a step with drafts."""
WARM_UP, STEPS = 8, 32
"""Steps of a round that do not count, and that do."""


class Round(TypedDict):
    """An engine's steps in a round; graphs are those replayed in a step."""

    milliseconds: list[float]
    graphs: float
    waits: int


Measured = dict[int, dict[str, list[Round]]]
"""Rounds of each side, by number of requests."""


class HostSide:
    """A side's engine, alone in its process, in which nothing has imported vLLM."""

    def __init__(self, side: str, requests: int) -> None:
        self._requests, self._names, self._graphs, self._waits = requests, count(), 0, 0
        from triton.runtime import interpreter

        interpreter.GridExecutor.__call__ = skip  # before the device makes launches of it
        from emulated import attention, torch_cuda, vllm_side

        vllm_side.use()
        self._device = torch_cuda.device()
        attention.attend = lambda *_, **__: None
        torch_cuda.CUDAGraph.replay = lambda _: self._replay()  # type: ignore[assignment,method-assign]
        from vllm import LLM, SamplingParams

        make_up_tokens()
        if side in (OURS, UNDRAFTED):
            make_up_decisions(has_blocks=side == OURS)
        native, most = {**DFLASH, "num_speculative_tokens": WIDTH}, max(requests, 4)
        sizes = sorted({1, 2, 4, most, 2 * most, 4 * most, 8 * most})
        graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
        self._engine = LLM(
            str(DEMO / "target"),
            dtype="float32",
            max_model_len=256,
            max_num_seqs=most,
            max_num_batched_tokens=16 * most,
            kv_cache_memory_bytes=max(32, 2 * most) << 20,
            gpu_memory_utilization=0.5,
            compilation_config={"mode": 0, **graphs},
            kernel_config={"enable_jit_warmup": False},  # it reads what kernels write
            speculative_config={PLAIN: None, NATIVE: native}.get(side, DFLASH),
        ).llm_engine
        # A server turns tokens into text in another process than its engine's.
        self._params = SamplingParams(max_tokens=190, ignore_eos=True, detokenize=False)
        self._device.set_hook(self._note_wait)

    def run(self) -> Round:
        """Run requests together for some steps, and drop them."""
        names = [str(next(self._names)) for _ in range(self._requests)]
        for name in names:
            prompt = [5 + (7 * int(name) + 3 * place) % 1900 for place in range(8)]
            self._engine.add_request(name, {"prompt_token_ids": prompt}, self._params)
        taken = []
        for step in range(WARM_UP + STEPS):
            if step == WARM_UP:
                self._graphs = self._waits = 0
            began = time.thread_time()
            self._engine.step()
            taken.append(1000 * (time.thread_time() - began))
        graphs = self._graphs / STEPS
        found = Round(milliseconds=taken[WARM_UP:], graphs=graphs, waits=self._waits)
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._device.synchronize()  # long queues slow its allocator down
        return found

    def close(self) -> None:
        """End the engine."""
        self._engine.engine_core.shutdown()

    def _replay(self) -> None:
        self._graphs += 1
        self._device.enqueue("graph", lambda: None, [])

    def _note_wait(self, *_: str) -> None:
        self._waits += 1


def skip(kernel: Any, *args: Any, **_: Any) -> None:
    """Run no kernel. An operator of PyTorch's reads the rows of one, and checks that they exist."""
    if kernel.fn.__name__ == "_combine_sampled_and_draft_tokens_kernel":
        dict(zip(kernel.arg_names, args, strict=False))["logits_indices_ptr"].zero_()


def make_up_tokens() -> None:
    """Let steps yield some tokens, for which nobody waits."""
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    get_output, arrived = AsyncOutput.get_output, SimpleNamespace(synchronize=lambda: None)

    def made_up(output: Any) -> Any:
        tokens, output.copy_event = output.sampled_token_ids, arrived
        tokens.fill(77)
        output.num_sampled_tokens_np.fill(min(TOKENS, tokens.shape[1]))
        return get_output(output)

    AsyncOutput.get_output = made_up


def make_up_decisions(*, has_blocks: bool) -> None:
    """Let ours draft a block in each step or in none, plan seldom, and wait for no report."""
    from support.planner_world import steady_costs
    from vllm_dflash.engine import cadence
    from vllm_dflash.engine.v2.exchange import HostCopy
    from vllm_dflash.engine.v2.v2_workers import V2GPUWorker
    from vllm_dflash.planning.planner import Planner
    from vllm_dflash.planning.step import BLOCK, COUNTS, Plan

    plan = Planner.plan

    def forced(planner: Any, ids: list[str], *args: Any, **more: Any) -> Plan:
        plan(planner, ids, *args, **more)  # takes its time
        drafted, lengths = np.full(len(ids), has_blocks), np.full(len(ids), WIDTH * has_blocks)
        return Plan(drafted, WIDTH * has_blocks, lengths)

    def reported(copy: Any) -> list[np.ndarray]:
        *tables, counts = copy._values
        for table in tables:  # of `Outcomes`: numbers, and confidence behind them
            table.fill(0.7 * has_blocks)
            outcome = BLOCK, WIDTH, 0, 0, 0, 0, WIDTH, TOKENS - 1
            table[:, :COUNTS] = np.multiply(outcome, has_blocks)
        counts.fill(0)
        return copy._values

    for owner, name, made_up in (
        (Planner, "plan", forced),
        (HostCopy, "wait", reported),
        (V2GPUWorker, "measure", lambda worker: steady_costs(worker.model_runner.max_num_reqs)),
    ):
        setattr(owner, name, made_up)
    cadence.MOST_TIME = 1e-9


def measure(requests: int, options: Any, logs: Path, progress: Progress) -> dict[str, list[Round]]:
    """Return each side's rounds. The engines end with it, even if it is interrupted."""
    here, found = Path(__file__).parent, {side: list[Round]() for side in SIDES}
    variables = {"PYTHONPATH": f"{here}{os.pathsep}{here.parent / 'tests'}"}
    variables |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        children = {}
        for side in SIDES:
            plugins = NO_PLUGIN if side in (PLAIN, NATIVE) else PLUGIN
            child = EngineChild(
                logs / f"{side.replace(' ', '-')}-{requests}.log",
                "host_time:HostSide",
                environment={**variables, "VLLM_PLUGINS": plugins},
                side=side,
                requests=requests,
            )
            children[side] = stack.enter_context(child)
            child.send("run")  # the first round does not count
        with progress.stage(f"{requests} requests: starting", len(SIDES), "engines") as tell:
            for done, (side, child) in enumerate(children.items()):
                tell(done, f"waiting for {side}")
                child.receive()
        began = time.monotonic()
        with progress.stage(f"{requests} requests", options.rounds, "rounds") as tell:
            for done in range(options.rounds):
                for side, child in children.items():
                    found[side].append(child.ask("run"))
                tell(done + 1)
                if time.monotonic() - began > options.seconds:
                    break
    return found


def medians(rounds: Sequence[Round]) -> np.ndarray:
    """Return the median time of a step in each round, in ms."""
    return np.array([np.median(one["milliseconds"]) for one in rounds])


def ratio(rounds: Sequence[Round], others: Sequence[Round]) -> str:
    """Format the ratios of two sides in the same rounds: their median and quartiles."""
    low, middle, high = np.quantile(medians(rounds) / medians(others), (0.25, 0.5, 0.75))
    return f"{middle:.2f} ({low:.2f} - {high:.2f})"


def report(measured: Measured) -> tuple[list[Table], list[str]]:
    """Return tables, and which sides did not do what they were to be timed at."""
    times, ratios, notes = [], [], []
    for requests, found in measured.items():
        numbers = [str(requests), str(len(found[PLAIN]))]
        times.append([*numbers, *(f"{np.median(medians(found[side])):.2f}" for side in SIDES)])
        ratios.append([*numbers, *(ratio(found[one], found[other]) for one, other in RATIOS)])
        for side, wanted in SIDES.items():
            if odd := sum(one["graphs"] != wanted or one["waits"] > 0 for one in found[side]):
                notes.append(
                    f"{side}, {requests} requests: in {odd} rounds, not {wanted} graphs a step, or"
                    " waits for the device."
                )
    heads = "requests", "rounds"
    of_ratios = (f"{one} / {other}" for one, other in RATIOS)
    return [
        Table("Milliseconds of the host a step: median of rounds", [*heads, *SIDES], times),
        Table("Ratios in a round: median (quartiles)", [*heads, *of_ratios], ratios),
    ], notes


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--requests", type=int, nargs="+", default=[1, 8, 32, 256])
    add("--rounds", type=int, default=40)
    add("--seconds", type=float, default=300.0, help="for the rounds of a number of requests")
    add("--out", type=Path, metavar="FILE.json", help="for the times of all steps")
    options, progress, measured = parser.parse_args(), progress_on(), Measured()
    with terminable(), temporary_logs("vllm-dflash-host-time-") as logs:
        for requests in options.requests:
            measured[requests] = measure(requests, options, logs, progress)
            if options.out:
                options.out.write_text(json.dumps(measured))
    print_report(*report(measured))


if __name__ == "__main__":
    main()
