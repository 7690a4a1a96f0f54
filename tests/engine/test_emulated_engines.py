"""vLLM's GPU worker with ours in it, on an emulated GPU: late work, streams, full graphs.

On every schedule, steps and counters are those of the CPU platform, which is never late, and no
stream misses a wait. Each run has its own engine.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from vllm import LLM
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from support.device_decisions import directed, lengths_in_turn
from support.emulated_runs import on_cpu, run, watched
from support.engines import DFLASH, engine, runner_of, scheduler_of, with_fixed_costs
from support.schedules import (
    GRAPHS,
    ON_GPU,
    REPEATING,
    SCENARIOS,
    SCHEDULES,
    Scenario,
    outcome_of,
    tokens_of,
)
from vllm_dflash.engine.v2 import exchange
from vllm_dflash.engine.v2.exchange import HostCopy
from vllm_dflash.engine.v2.speculator import PlannedSpeculator

pytestmark = pytest.mark.emulated
SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("has_graphs", [False, True], ids=["eager", "graphs"])
def test_plain_decoding_writes_what_the_cpu_platform_writes(has_graphs: bool) -> None:
    found = run("plain", "latest", has_graphs=has_graphs)
    assert tokens_of(found) == tokens_of(on_cpu("plain"))


@pytest.mark.parametrize(
    "schedule", [pytest.param(n, marks=[] if n == "latest" else SLOW) for n in SCHEDULES]
)
def test_graphs_step_and_count_as_on_the_cpu_platform(schedule: str) -> None:
    found = run("fixed", schedule, has_graphs=True)
    assert found == on_cpu("asynchronous: fixed")
    assert found["counters"]["accepted_tokens"] > 0


def test_graphs_of_blocks_of_k_rows_step_and_count_as_on_the_cpu_platform() -> None:
    """Blocks have 8 rows; their drafts are verified in 9."""
    name = "fixed, sampled from anchors"
    found = run(name, "others ahead", has_graphs=True)
    assert found == on_cpu(f"asynchronous: {name}")
    assert tokens_of(found) == tokens_of(on_cpu("plain"))
    assert found["counters"]["draft_tokens"] > 7 * found["counters"]["verifications"]


KINDS = {
    "fixed": "others ahead",
    "planned": "random 2",
    "free drafts": "model ahead",
    "DFlash 2": "latest",
    "LiLiCorr": "random 1",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=SLOW if n in ("fixed", "LiLiCorr") else []) for n in KINDS]
)
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
    ("name", "has_graphs"), [("planned", False), pytest.param("fixed", True, marks=SLOW)]
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
    [pytest.param(n, marks=[] if n == "LiLiCorr" else SLOW) for n in KINDS if n != "fixed"],
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
        (PlannedSpeculator, "propose", "item"),
    ],
    ids=["a race", "a wait"],
)
def test_what_engines_are_watched_for_is_noticed(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, is_noticed_as: str
) -> None:
    """A report is written while it is copied; the host waits in a step."""
    original = getattr(kind, name)

    def waits(speculator: PlannedSpeculator, *args: Any, **more: Any) -> Any:
        speculator.batch.slots.sum().item()
        return original(speculator, *args, **more)

    monkeypatch.setattr(kind, name, waits if kind is PlannedSpeculator else lambda _: None)
    with pytest.raises(AssertionError, match=is_noticed_as):
        run("planned", "latest", has_graphs=False)


def test_what_the_host_is_sent_does_not_hold_up_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is copied on vLLM's copy stream, after the tokens of earlier steps."""
    used: set[int] = set()

    def noted(tensor: torch.Tensor) -> Any:
        used.add(torch.cuda.current_stream().stream_id)
        return async_copy_to_np(tensor)

    monkeypatch.setattr(exchange, "async_copy_to_np", noted)
    scenario = SCENARIOS["planned"]
    with (
        with_fixed_costs(),
        engine(async_scheduling=True, **scenario.settings, **ON_GPU, **GRAPHS) as llm,
    ):
        used.clear()
        outcome_of(llm, scenario)
        assert used == {runner_of(llm).output_copy_stream.stream_id}


def test_hazard_vllms_adaptive_verification_with_more_requests_than_blocks_have_room_for() -> None:
    """vLLM's own manager drops drafts by our chances. Its graphs, for any lengths, have a request
    for each row: the blocks of 16 would be 128 rows, in buffers of 64."""
    scenario = Scenario({**DFLASH, "enable_adaptive_verification": True})
    many = {**scenario.settings, **ON_GPU, **GRAPHS, "max_num_seqs": 16}
    with engine(async_scheduling=True, **many) as llm:
        runner = runner_of(llm)
        assert type(runner.adaptive_verification) is AdaptiveVerificationManager
        rows = [graph.num_reqs * runner.speculator.num_query_per_req for graph in graphs_of(llm)]
        assert max(rows) > runner.speculator.max_num_tokens
        found = outcome_of(llm, scenario)
    assert tokens_of(found) == tokens_of(on_cpu("plain"))
    assert found["counters"]["accepted_tokens"] > 0


@pytest.mark.slow
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


def test_steps_without_a_block_have_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, and steps that only store context or take what texts predict, in turn. Each has its
    graphs, and tokens and counters are those of an engine without any."""
    scenario, outcomes, replayed = Scenario(DFLASH, REPEATING), [], set[str]()
    for has_graphs in (True, False):
        with watched("random 2", has_graphs=has_graphs, **scenario.settings) as llm:
            directed(llm, monkeypatch, lengths_in_turn(7, 0, 0, 3, 0))
            scheduler_of(llm)._update_in = 2  # rates are sent meanwhile
            replayed.clear()
            speculator = runner_of(llm).speculator
            for name in ("block_graphs", "context_graphs"):
                manager = getattr(speculator, name)

                def run_fullgraph(desc: Any, *, name: str = name, manager: Any = manager) -> Any:
                    replayed.add(name)
                    return type(manager).run_fullgraph(manager, desc)

                manager.run_fullgraph = run_fullgraph
            outcomes.append(outcome_of(llm, scenario))
            assert replayed == ({"block_graphs", "context_graphs"} if has_graphs else set())
    assert outcomes[0] == outcomes[1]
    assert tokens_of(outcomes[0]) == tokens_of(on_cpu("asynchronous: free drafts"))
    assert outcomes[0]["counters"]["skipped_steps"] > 0


def graphs_of(llm: LLM) -> list[Any]:
    return [*runner_of(llm).cudagraph_manager.graphs]
