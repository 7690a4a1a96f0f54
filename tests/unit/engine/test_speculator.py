"""What the speculator adds to vLLM's, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.v2 import device_step as module
from vllm_dflash.engine.v2.device_step import DeviceStep
from vllm_dflash.engine.v2.draft_slots import Drafts
from vllm_dflash.engine.v2.exchange import DIRECTIONS, Directions
from vllm_dflash.engine.v2.loaded_speculator import block_capture_sizes
from vllm_dflash.engine.v2.speculator import PlannedSpeculator
from vllm_dflash.engine.v2.text_look_up import has_room_for_texts
from vllm_dflash.planning.costs import COSTS
from vllm_dflash.planning.step import BLOCK, Learned

K, SLOTS, CPU = 3, 6, torch.device("cpu")


def bare() -> Any:
    made: Any = object.__new__(PlannedSpeculator)
    made.device, made.num_speculative_steps = CPU, K
    made.draft_tokens = made.handed_over = torch.zeros(4, K, dtype=torch.int64)
    made.trees, made.num_query_per_req, made.max_num_tokens = None, 1 + K, 4 * (1 + K)
    texts: Any = SimpleNamespace(look_up=lambda _: None)
    made.device_step = DeviceStep(SLOTS, Drafts(made.draft_tokens, *torch.zeros(2, 4, K)), texts)
    made.statistics, made.budget = DraftStatistics(K), None
    made.runs_target_alone, made.newly_admitted = False, ()
    made.windowed, made.timer, made._window_report = None, None, []
    made.req_states = SimpleNamespace(
        req_id_to_index={"a": 4, "b": 0, "c": 5, "d": 2},
        all_token_ids=SimpleNamespace(gpu=None),
        total_len=SimpleNamespace(gpu=None),
        last_sampled_tokens=None,
    )
    return made


def scheduled(directions: Directions, new: tuple[str, ...] = ()) -> Any:
    step: Any = SimpleNamespace(
        num_spec_tokens_to_schedule=K,
        total_num_scheduled_tokens=4,
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
    )
    DIRECTIONS.attach(step, directions)
    return step


def test_slots_of_new_requests_are_forgotten_before_they_are_graded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No others are: `c` and `b` are new, `gone` has left again."""
    speculator = bare()
    speculator.device_step.slots.records[:, 0] = BLOCK
    seen: list[list[int]] = []
    monkeypatch.setattr(
        module, "grade", lambda slots, *_: seen.append(slots.records[:, 0].tolist())
    )
    monkeypatch.setattr(DFlashSpeculator, "propose", lambda *_, **__: None)
    monkeypatch.setattr(module, "choose", lambda *_, **__: None)
    speculator.begin_step(scheduled(Directions(True), new=("c", "b", "gone")))
    ones = torch.ones(4, dtype=torch.int32)
    speculator.observe_verification(torch.arange(4), ones, ones)
    speculator.propose(SimpleNamespace(num_reqs=4), num_speculative_tokens=K)
    assert seen == [[0, 1, 1, 1, 1, 0]]


def test_what_was_learned_is_taken_over() -> None:
    speculator = bare()
    told: list[Any] = []
    speculator.budget = SimpleNamespace(begin_step=told.append)
    rates = np.full((K, 11), 0.25), np.full((K, 11), 0.5)
    directions = Directions(True, learned=Learned(np.zeros(1, COSTS), *rates))
    speculator.begin_step(scheduled(directions))
    assert speculator.device_step.slots.rates[0].unique().tolist() == [0.25]
    assert speculator.device_step.slots.rates[1].unique().tolist() == [0.5]
    assert told == [directions]
    nobody = scheduled(Directions(False))
    nobody.total_num_scheduled_tokens = 0  # nothing is verified or drafted
    speculator.begin_step(nobody)
    assert told == [directions]


def test_what_the_scheduler_has_counted_is_shown_by_the_worker() -> None:
    speculator, counting = bare(), DraftStatistics(K)
    counting.probes, counting.planning_seconds, counting.step_seconds = 3, 0.5, 2.0
    counting.costs[0] = 2, 4.0, 6.0
    speculator.statistics.steps = 7
    speculator.begin_step(scheduled(Directions(True, counted=counting.of_planning())))
    shown = speculator.statistics.to_dict()
    assert (shown["steps"], shown["probes"], shown["planning_share"]) == (7, 3, 0.25)
    assert shown["costs_ms"]["step"] == {"estimated": 2000.0, "measured": 3000.0}


@pytest.mark.parametrize(
    ("largest", "block_rows", "most_requests", "requests"),
    [
        (512, 16, 256, [40, 50, 62, 77, 96, 120, 128]),
        (512, 16, 41, [40, 41]),  # as many as a step has rows for
        (4, 16, 64, [1]),
    ],
)
def test_sizes_of_the_drafters_graphs(
    largest: int, block_rows: int, most_requests: int, requests: list[int]
) -> None:
    """The target's sizes, and some up to four times as large."""
    found = block_capture_sizes([1, 2, largest], block_rows, most_requests)
    assert found == [1, 2, largest, *(count * block_rows for count in requests)]


@pytest.mark.parametrize(("length", "fits"), [(1 << 16, True), (1 << 20, False)])
def test_texts_that_would_take_too_much_memory_are_not_looked_up(length: int, fits: bool) -> None:
    assert has_room_for_texts(1024, length) is fits


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_the_newest_context_is_kept_for_lilicorr(version: str) -> None:
    """It is the context of each request's last row that was not rejected. For padding, any row that
    exists will do."""
    speculator = bare()
    speculator.hidden_states = torch.arange(20.0).view(10, 2)
    speculator.newest_context = None
    starts = torch.tensor([0, 4, 5, 5, 5], dtype=torch.int32)
    rejected = torch.tensor([1, 0, 9, 0], dtype=torch.int32)
    where: tuple[Any, ...] = (3, starts)
    if version == "0.32":
        where = (SimpleNamespace(num_reqs=3, query_start_loc=starts),)
    speculator.prepare_context_anchor(*where, rejected)  # another drafter does not need it
    speculator.newest_context = torch.full((4, 2), -1.0)
    speculator.prepare_context_anchor(*where, rejected)
    assert speculator.newest_context.tolist() == [[4, 5], [8, 9], [0, 1], [-1, -1]]
