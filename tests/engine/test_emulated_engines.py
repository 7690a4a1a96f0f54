"""vLLM's GPU worker with ours in it, on an emulated GPU: late work, streams, full graphs.

On every schedule, steps and counters are those of the CPU platform, which is never late, and no
stream misses a wait. Each run has its own engine.
"""

from __future__ import annotations

from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from vllm import LLM
from vllm.v1.worker.gpu.async_utils import async_copy_to_np

from support.emulated_runs import on_cpu, run, watched
from support.engines import FIXED, engine, held_out_prompts, runner_of, with_fixed_costs
from support.schedules import (
    GRAPHS,
    ON_GPU,
    SCENARIOS,
    SCHEDULES,
    Scenario,
    outcome_of,
    tokens_of,
)
from vllm_dflash.engine.v2 import exchange
from vllm_dflash.engine.v2.device_step import DeviceStep
from vllm_dflash.engine.v2.draft_slots import Batch
from vllm_dflash.engine.v2.exchange import HostCopy
from vllm_dflash.planning import window as window_module
from vllm_dflash.planning.window import Chosen, Window, WindowChooser

pytestmark = pytest.mark.emulated
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "has_graphs", [pytest.param(False, marks=SLOW, id="eager"), pytest.param(True, id="graphs")]
)
def test_plain_decoding_writes_what_the_cpu_platform_writes(has_graphs: bool) -> None:
    found = run("plain", "latest", has_graphs=has_graphs)
    assert tokens_of(found) == tokens_of(on_cpu("plain"))


@pytest.mark.parametrize(
    "schedule", [pytest.param(n, marks=[] if n == "latest" else SLOW) for n in SCHEDULES]
)
def test_graphs_and_trimming_step_and_count_as_on_the_cpu_platform(schedule: str) -> None:
    """As users start it: planned lengths, asynchronous, full graphs, trimmed by the device."""
    found = run("trimmed", schedule, has_graphs=True)
    assert found == on_cpu("asynchronous: trimmed")
    assert found["counters"]["accepted_tokens"] > 0


KINDS = {
    "fixed": "others ahead",
    "any length": "random 2",
    "free drafts": "model ahead",
    "DFlash 2": "latest",
    "LiLiCorr": "random 1",
}


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_drafting_steps_and_counts_as_on_the_cpu_platform(name: str) -> None:
    found = run(name, KINDS[name], has_graphs=False)
    assert found == on_cpu(f"asynchronous: {name}")
    assert found["counters"]["accepted_tokens"] > 0
    assert found["counters"]["nan_drafts"] == 0
    if SCENARIOS[name].prompts == SCENARIOS["plain"].prompts:
        assert tokens_of(found) == tokens_of(on_cpu("plain"))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_drafting_on_all_schedules(name: str, schedule: str) -> None:
    assert run(name, schedule, has_graphs=False) == on_cpu(f"asynchronous: {name}")


@pytest.mark.parametrize(
    ("name", "has_graphs"), [("any length", False), pytest.param("trimmed", True, marks=SLOW)]
)
def test_synchronous_scheduling_steps_and_counts_as_on_the_cpu_platform(
    name: str, has_graphs: bool
) -> None:
    found = run(name, "random 2", is_async=False, has_graphs=has_graphs)
    assert found == on_cpu(name)


@cache
def never_late(name: str) -> dict[str, Any]:
    """Return the outcome with the few lengths that have graphs; the CPU platform has none."""
    return run(name, "at once", has_graphs=True)


@pytest.mark.parametrize("schedule", ["others ahead", pytest.param("random 1", marks=SLOW)])
@pytest.mark.parametrize(
    "name",
    ["free drafts", *(pytest.param(n, marks=SLOW) for n in ("any length", "DFlash 2", "LiLiCorr"))],
)
def test_few_lengths_with_graphs_step_and_count_as_on_a_device_that_is_never_late(
    name: str, schedule: str
) -> None:
    found = run(name, schedule, has_graphs=True)
    assert found == never_late(name)
    assert tokens_of(found) == tokens_of(on_cpu(f"asynchronous: {name}"))


@pytest.mark.parametrize(
    ("kind", "name", "is_noticed_as"),
    [
        (HostCopy, "before_writing", "copy to pinned memory"),
        (DeviceStep, "before_block", "item"),
    ],
    ids=["a race", "a wait"],
)
def test_what_engines_are_watched_for_is_noticed(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, is_noticed_as: str
) -> None:
    """A report is written while it is copied; the host waits in a step."""
    original = getattr(kind, name)

    def waits(step: DeviceStep, batch: Batch, *args: Any) -> None:
        batch.slots.sum().item()
        original(step, batch, *args)

    monkeypatch.setattr(kind, name, waits if kind is DeviceStep else lambda _: None)
    with pytest.raises(AssertionError, match=is_noticed_as):
        run("any length", "latest", has_graphs=False)


def test_what_the_host_is_sent_does_not_hold_up_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is copied on vLLM's copy stream, after the tokens of earlier steps."""
    used: set[int] = set()

    def noted(tensor: torch.Tensor) -> Any:
        used.add(torch.cuda.current_stream().stream_id)
        return async_copy_to_np(tensor)

    monkeypatch.setattr(exchange, "async_copy_to_np", noted)
    scenario = SCENARIOS["trimmed"]
    with (
        with_fixed_costs(),
        engine(async_scheduling=True, **scenario.settings, **ON_GPU, **GRAPHS) as llm,
    ):
        used.clear()
        outcome_of(llm, scenario)
        assert used == {runner_of(llm).output_copy_stream.stream_id}


def test_hazard_a_start_with_more_requests_than_blocks_have_room_for() -> None:
    """Graphs for any lengths have a request for each row: the blocks of 16 would be 128 rows, in
    buffers of 64. Costs are measured, as for users."""
    many = {**SCENARIOS["trimmed"].settings, **ON_GPU, **GRAPHS, "max_num_seqs": 16}
    with engine(async_scheduling=True, **many) as llm:
        speculator = runner_of(llm).speculator
        rows = [graph.num_reqs * speculator.num_query_per_req for graph in graphs_of(llm)]
        assert max(rows) > speculator.max_num_tokens
        assert speculator.budget.costs is not None
        assert tokens_of(outcome_of(llm, SCENARIOS["trimmed"])) == tokens_of(on_cpu("plain"))


def test_blocks_of_more_requests_than_the_targets_graphs_take_are_graphs() -> None:
    """The target's graphs end at 16 rows, the blocks of two requests."""
    sizes = {**GRAPHS["compilation_config"], "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    settings = {**SCENARIOS["fixed"].settings, **ON_GPU, **GRAPHS, "compilation_config": sizes}
    replayed: list[int] = []
    with engine(async_scheduling=True, **settings) as llm:
        manager = runner_of(llm).speculator.query_cudagraph_manager
        replay = manager.run_fullgraph
        manager.run_fullgraph = lambda desc: (replayed.append(desc.num_reqs), replay(desc))
        found = outcome_of(llm, SCENARIOS["fixed"])
        assert max(graph.num_tokens for graph in graphs_of(llm)) == 16
    assert max(replayed) == 3
    assert tokens_of(found) == tokens_of(on_cpu("plain"))


def test_graphs_follow_windows_that_change_from_step_to_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every third block attends to whole contexts, and the last one does not."""
    speculative = {**FIXED, "draft_window": "auto"}
    scenario = Scenario(speculative, [text[:200] for text in held_out_prompts(3)])
    monkeypatch.setattr(window_module, "TOKENS", (8,))
    outcomes = []
    for has_graphs in (True, False):
        turns = cycle([Window(), *[Window(tokens=8, shortest=40, octave=0)] * 2])
        chosen: list[Window] = []

        def choose(*_: Any, turns: Any = turns, chosen: Any = chosen) -> Chosen:
            chosen.append(next(turns))
            return Chosen(chosen[-1], chosen[-1])

        monkeypatch.setattr(WindowChooser, "choose", choose)
        settings = {**scenario.settings, "max_model_len": 256}
        with watched("latest", has_graphs=has_graphs, **settings) as llm:
            outcomes.append(outcome_of(llm, scenario))
            speculator = runner_of(llm).speculator
            windowed = speculator.windowed
            assert windowed is not None
            lens = windowed.lens, speculator.input_buffers.seq_lens
            left, whole = (each.clone() for each in lens)
        assert int(left[0]) == int(whole[0]) - 32  # of its last block, which has the window
        assert len({*chosen}) == 2
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["counters"]["accepted_tokens"] > 0


def graphs_of(llm: LLM) -> list[Any]:
    return [*runner_of(llm).cudagraph_manager.graphs]
