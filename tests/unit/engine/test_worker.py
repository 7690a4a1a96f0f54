"""What workers add to an engine's start and to the end of a step."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from support import TESTS, importing_support
from support.planner_world import profiled_costs
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.cpu_worker import DraftingCPUWorker
from vllm_dflash.engine.own_limits import OwnLimits
from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.v1 import v1_worker
from vllm_dflash.engine.v1.proposer import PlannedProposer
from vllm_dflash.engine.v1.v1_scheduler import DRAFTS
from vllm_dflash.engine.v1.v1_worker import V1CPUWorker
from vllm_dflash.engine.v2.draft_slots import DraftSlots
from vllm_dflash.engine.v2.exchange import FACTS, WorkerFacts
from vllm_dflash.engine.v2.v2_cpu_worker import V2CPUWorker
from vllm_dflash.engine.v2.v2_workers import V2GPUWorker
from vllm_dflash.engine.worker import DraftingWorker
from vllm_dflash.planning.step import StepRecord


def test_a_step_whose_first_half_failed_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM still asks for tokens, gets None, and then reports the failure."""
    monkeypatch.setattr(Worker, "sample_tokens", lambda self, grammar_output: None)
    worker: Any = object.__new__(V2GPUWorker)
    worker._to_send = "sent with the first output"
    assert worker.sample_tokens(None) is None
    assert worker._to_send


def test_blocks_that_a_preempted_request_once_had_are_not_dropped() -> None:
    """Another request may have them now, and its context may wait for them. The runner still lists
    it, but it has no row. A new request found the first of its two blocks, 8 and 9."""
    proposer: Any = object.__new__(PlannedProposer)
    dropped: list[int] = []
    cache = SimpleNamespace(enable_prefix_caching=False)
    proposer.vllm_config = SimpleNamespace(cache_config=cache)
    proposer.kv_cache_gid, proposer.scheduler_page_size = 0, 32
    backlog = SimpleNamespace(drop=lambda blocks, _: dropped.extend(blocks))
    proposer.host = SimpleNamespace(backlog=backlog, begin_step=lambda *_: None)
    proposer._own_limits = OwnLimits()
    ended, preempted = (SimpleNamespace(block_ids=([block],), num_tokens=9) for block in (5, 6))
    proposer.runner = SimpleNamespace(
        requests={"ended": ended, "preempted": preempted},
        input_batch=SimpleNamespace(req_id_to_index={"ended": 0, "other": 1}),
    )
    new = SimpleNamespace(
        req_id="new", block_ids=([8, 9],), num_computed_tokens=32, sampling_params=None
    )
    step = SimpleNamespace(
        finished_req_ids={"ended", "preempted", "of another time"},
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=CachedRequestData.make_empty(),
    )
    proposer.begin_step(step)
    assert dropped == [9, 5]


@pytest.mark.parametrize(("lengths", "are_sent"), [([7, 0], True), ([0, 0], False)])
def test_one_request_with_drafts_is_enough_to_send_them(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], are_sent: bool
) -> None:
    """They go to processes that the engine would not call for drafts."""
    worker: Any = object.__new__(V1CPUWorker)
    worker.vllm_config = None
    step = StepRecord(["a", "b"], np.ones(2, int), lengths=np.array(lengths))
    worker.drafter = SimpleNamespace(record=step, end_step=lambda: None)
    monkeypatch.setattr(v1_worker, "sends_drafts_with_output", lambda _: True)
    monkeypatch.setattr(worker, "take_draft_token_ids", lambda: "drafts")
    output = worker.end_step(SimpleNamespace())
    assert DRAFTS.on(output) == ("drafts" if are_sent else None)


class Drafter:
    """Counts the steps that run. What it did before a user's first step must not show."""

    num_query_per_req = 8

    def __init__(self) -> None:
        self.statistics = DraftStatistics(7)
        self.sealed_with: list[int] = []
        self.trees = None
        self.slots = DraftSlots(2, 7, torch.device("cpu"))
        self.warm = SimpleNamespace(seal=lambda: self.sealed_with.append(self.count()))

    def count(self) -> int:
        return self.statistics.steps + self.statistics.nan_drafts

    def before_capture(self, runner: Any) -> None:
        self.run(1)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.statistics.record_blocks([7], any_eligible=True)
            self.statistics.nan_drafts += 1
            for each in (self.slots.records, self.slots.overall, self.slots.counts):
                each += 1

    def wrap_output(self, output: Any) -> Any:
        return output


@pytest.mark.parametrize("is_planned", [True, False])
def test_what_runs_before_a_users_first_step_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, is_planned: bool
) -> None:
    """vLLM's warm-up goes through the worker like a user's steps; a profile runs both models."""
    worker: Any = object.__new__(V2GPUWorker)
    worker.rank, worker.drafter = 0, Drafter()
    worker.model_config = SimpleNamespace(model="T")
    worker.vllm_config = SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=True))
    parallel = SimpleNamespace(enable_batch_sharded_sampling=False)
    worker.model_runner = SimpleNamespace(
        max_num_reqs=2,
        max_num_tokens=64,
        max_model_len=64,
        _dummy_run=lambda *_, **__: worker.drafter.run(1),
        parallel_config=parallel,
        rejection_sampler=None,
        model_state=SimpleNamespace(prepare_attn=None),
        sampler=SimpleNamespace(logits_processors=()),
    )
    options = SimpleNamespace(is_planned=is_planned, drafter=SimpleNamespace(model="D"))
    monkeypatch.setattr(EngineOptions, "from_config", lambda _: options)
    output = SimpleNamespace(model_runner_output=SimpleNamespace())
    monkeypatch.setattr(Worker, "sample_tokens", lambda *_: output)

    def warm_up(self: Any) -> str:
        self.drafter.run(2)
        self.sample_tokens(None)
        self._maybe_activate_jit_monitor()
        return "seconds"

    def plan(self: Any) -> None:
        """Compile kernels, perhaps: the monitor would end the engine for it."""
        assert not monitored
        self.drafter.run(5)

    monitored: list[Any] = []
    monkeypatch.setattr(Worker, "compile_or_warm_up_model", warm_up)
    monkeypatch.setattr(Worker, "_maybe_activate_jit_monitor", lambda self: monitored.append(self))
    monkeypatch.setattr(V2GPUWorker, "_plan_lengths", plan)
    assert worker.compile_or_warm_up_model() == "seconds"
    assert monitored == [worker]
    assert worker.drafter.sealed_with == [0]
    assert not worker.drafter.slots.records.any()
    assert not worker.drafter.slots.overall.any()
    assert not worker.drafter.slots.counts.any()
    (watch,) = worker._ticking
    assert not watch.__self__._warned_of_nan
    worker.drafter.run(3)
    assert worker.drafter.count() == 6


@pytest.mark.parametrize(
    ("max_model_len", "lengths"),
    [(4096, [8, 24, 56, 120, 248]), (100, [8, 24, 56, 92]), (8, [])],
)
def test_kernels_for_prompts_are_compiled_before_requests(
    max_model_len: int, lengths: list[int]
) -> None:
    """For one request of each length: vLLM compiles by the longest one of a batch."""
    worker: Any = object.__new__(V2GPUWorker)
    worker.drafter, runs = Drafter(), list[tuple[int, int]]()

    def run(tokens: int, *, skip_eplb: bool) -> None:
        assert skip_eplb
        runs.append((tokens, worker.model_runner.max_num_reqs))

    worker.model_runner = SimpleNamespace(
        max_num_reqs=64, max_num_tokens=8192, max_model_len=max_model_len, _dummy_run=run
    )
    worker._warm_prompts()
    assert runs == [(tokens, 1) for tokens in lengths]
    assert worker.model_runner.max_num_reqs == 64


@pytest.mark.parametrize("is_draft", [False, True])
def test_new_weights_for_a_drafter_are_refused_before_anything_changes(is_draft: bool) -> None:
    """New weights of a target are not refused."""
    worker: Any = object.__new__(V2GPUWorker)
    called: list[str] = []
    worker.vllm_config = VllmConfig()
    worker._weight_update_active = False
    worker.speculative_config = SimpleNamespace(draft_model_config="config")
    worker.model_runner = SimpleNamespace(get_draft_model=lambda: "drafter")
    worker.weight_transfer_engine = SimpleNamespace(
        supports_draft_weight_update=True,
        set_weight_update_target=lambda *_: called.append("set"),
        start_weight_update=lambda: called.append("start"),
        reset_weight_update_target=lambda: called.append("reset"),
    )
    assert not worker.supports_draft_weight_updates()
    if not is_draft:
        worker.start_weight_update()
        assert (called, worker._weight_update_active) == (["start"], True)
        return
    with pytest.raises(RuntimeError, match="loads a drafter's weights once"):
        worker.start_draft_weight_update()
    assert (called, worker._weight_update_active) == (["reset"], False)


@pytest.mark.parametrize("kind", [V1CPUWorker, V2CPUWorker, V2GPUWorker])
def test_a_runner_that_built_another_drafter_is_refused(kind: type) -> None:
    worker: Any = object.__new__(kind)
    worker.model_runner = SimpleNamespace(drafter=SimpleNamespace(), speculator=SimpleNamespace())
    with pytest.raises(RuntimeError, match="SimpleNamespace as its drafter"):
        worker.attach()


def test_what_a_worker_found_out_is_sent_once() -> None:
    """Sent again, it would undo what the scheduler has learned since."""
    worker: Any = object.__new__(V2GPUWorker)
    worker.drafter = SimpleNamespace(wrap_output=lambda output: output)
    worker._to_send = ((FACTS, WorkerFacts(profiled_costs(), [0, 7])),)
    outputs = [SimpleNamespace(model_runner_output=SimpleNamespace()) for _ in range(2)]
    for output in outputs:
        assert worker.end_step(output) is output
    first, second = (FACTS.on(output.model_runner_output) for output in outputs)
    assert first is not None
    assert first.lengths == [0, 7]
    assert second is None


def test_blocks_that_the_drafters_layers_get_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have their own cache groups, with other numbers and block sizes than the target's."""
    monkeypatch.setattr(CPUWorker, "initialize_from_config", lambda *_: None)
    monkeypatch.setattr(DraftingWorker, "execute_model", lambda *_: None)
    layers = [
        SimpleNamespace(layer_name=f"draft.{n}", kv_cache=torch.full((10, 1), torch.nan))
        for n in range(2)
    ]
    attentions = [SimpleNamespace(attn=layer) for layer in layers]
    context = SimpleNamespace(attentions=attentions)
    worker: Any = object.__new__(DraftingCPUWorker)
    worker.drafter = SimpleNamespace(model=SimpleNamespace(context=context))
    groups = [(["state"], 64), (["target", "draft.0"], 32), (["draft.1"], 16)]
    worker.initialize_from_config(
        SimpleNamespace(
            num_blocks=10,
            kv_cache_groups=[
                SimpleNamespace(layer_names=names, kv_cache_spec=SimpleNamespace(block_size=size))
                for names, size in groups
            ],
        )
    )
    new = SimpleNamespace(block_ids=([9], [1, 2], [3, 4, 5]), num_computed_tokens=32)
    going_on = CachedRequestData.make_empty()
    worker.execute_model(SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=going_on))
    cleared = [(layer.kv_cache == 0).flatten().nonzero().flatten().tolist() for layer in layers]
    assert cleared == [[2], [5]]


def test_on_a_gpu_nothing_imports_v1_or_what_takes_cuda_out_of_torch() -> None:
    """vLLM's CPU worker replaces streams, events and pinned memory for the whole process, and V1
    will leave vLLM. Covers our package on a GPU, and what is run on GPUs to test it."""
    code = f"""
import runpy, sys
import gpu.gpu_kernels, gpu.gpu_soak, gpu.gpu_text
from importlib import import_module
from vllm_dflash.config.engine_options import GPU_WORKER, SCHEDULER
for name in (GPU_WORKER, SCHEDULER):
    import_module(name.rpartition(".")[0])
wrong = [name for name in sys.modules if name.startswith("vllm_dflash.engine.v1")]
for file in {sorted(map(str, TESTS.glob("engine/test_cuda*.py")))}:
    runpy.run_path(file, run_name="imported")
wrong += [name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")]
sys.exit(", ".join(wrong) or None)
"""
    environment = {**os.environ, **importing_support()}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
