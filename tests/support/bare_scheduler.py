"""Our schedulers for V2 without vLLM's below them, and what they exchange with workers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import RequestStatus

from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.cadence import Cadence
from vllm_dflash.engine.v2 import v2_scheduler
from vllm_dflash.engine.v2.exchange import OUTCOMES
from vllm_dflash.engine.v2.grading import OUTCOME_COLUMNS
from vllm_dflash.engine.v2.v2_scheduler import V2AsyncScheduler
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import BLOCK, NO_DRAFTS, Plan

CONTEXT_TOKENS = 100
"""Context of every request."""
MAX_LEN = 4096
WIDTH = 7


def request(computed: int = CONTEXT_TOKENS, draft_slots: int = 0, left: int = 50) -> Any:
    """Return a request that decodes, with `draft_slots` and `left` tokens to come."""
    return SimpleNamespace(
        num_computed_tokens=computed,
        num_tokens=computed + 1,
        num_prompt_tokens=computed,
        max_tokens=1 + left,
        spec_token_ids=[-1] * draft_slots,
        sampling_params=SamplingParams(),
        status=RequestStatus.RUNNING,
    )


def take_vllm_out(
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_async: bool = True,
    tree_nodes: int = 0,
    plans_every_step: bool = True,
    drops_drafts: bool = False,
    max_len: int = MAX_LEN,
    block_rows: int = 1 + WIDTH,
) -> None:
    """Make vLLM's schedulers do nothing, and ours plan up to 7 drafts and draft slots for trees of
    `tree_nodes` nodes. Steps take no time here, so they would be planned only now and then.
    `drops_drafts`: with vLLM's adaptive verification."""
    requests = SimpleNamespace(get=lambda _: request())
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            async_scheduling=is_async, max_num_seqs=256, max_num_batched_tokens=2 * max_len
        ),
        speculative_config=SimpleNamespace(
            draft_model_config=None,
            num_speculative_tokens=max(WIDTH, tree_nodes),
            max_num_new_slots_for_drafting=WIDTH,
            enable_adaptive_verification=drops_drafts,
        ),
    )
    for kind in (Scheduler, AsyncScheduler):
        monkeypatch.setattr(kind, "__init__", lambda self: None)
        monkeypatch.setattr(kind, "_update_after_schedule", lambda *_: None)
    monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: {0: EngineCoreOutputs()})
    for name, value in (
        ("num_spec_tokens", max(WIDTH, tree_nodes)),
        ("max_model_len", max_len),
        ("max_num_scheduled_tokens", 2 * max_len),
        ("max_num_active_reqs", 256),
        ("vllm_config", config),
        ("requests", requests),
    ):
        monkeypatch.setattr(Scheduler, name, value, raising=False)
    options = SimpleNamespace(
        is_planned=True,
        draft_width=WIDTH,
        block_rows=block_rows,
        tree_nodes=tree_nodes,
        most_active=None,
    )
    monkeypatch.setattr(EngineOptions, "from_config", lambda _: options)
    monkeypatch.setattr(v2_scheduler, "drafted_length", lambda _: max_len)
    if plans_every_step:
        monkeypatch.setattr(Cadence, "is_due", lambda *_: True)


def step(
    drafts: dict[str, int],
    produced: dict[str, int],
    rows: dict[str, int] | None = None,
    *,
    next_drafts: int = 0,
    source: int = BLOCK,
    admitted: dict[str, int] | None = None,
    placeholders: str = "",
    reports: bool = True,
) -> Any:
    """A scheduled step and its output.

    Args:
        drafts: draft slots of each request.
        produced: tokens that each request got.
        rows: of each request; one and its drafts by default.
        next_drafts: slots for the drafts that the step makes.
        source: source of the drafts.
        admitted: each request's drafts that were verified; all by default.
        placeholders: names, a letter each, of requests whose drafts are vLLM's placeholders.
        reports: whether workers send what became of the drafts.
    """
    rows = rows or {name: 1 + k for name, k in drafts.items()}
    scheduled = SimpleNamespace(
        num_scheduled_tokens=rows,
        total_num_scheduled_tokens=sum(rows.values()),
        scheduled_spec_decode_tokens={name: [-1] * k for name, k in drafts.items() if k},
        num_spec_tokens_to_schedule=next_drafts,
        scheduled_new_reqs=[],
        finished_req_ids=set(),
    )
    output = SimpleNamespace(
        req_ids=list(produced),
        req_id_to_index={name: i for i, name in enumerate(produced)},
        sampled_token_ids=[[5] * count for count in produced.values()],
    )
    kept = {**drafts, **(admitted or {})}
    rows_of = np.array([kept.get(name, 0) for name in produced], dtype=np.int64)
    verified = rows_of * np.array([name not in placeholders for name in produced], dtype=np.int64)
    table = np.zeros((len(produced), OUTCOME_COLUMNS + WIDTH))
    table[:, 0], table[:, 1] = np.where(verified > 0, source, NO_DRAFTS), rows_of
    table[:, 6], table[:, 7] = verified, (np.array([*produced.values()]) - 1) * (verified > 0)
    table[:, OUTCOME_COLUMNS:] = 0.5 * (np.arange(WIDTH) < verified[:, None])
    if reports:
        OUTCOMES.attach(output, table)
    return scheduled, output


def bare(monkeypatch: pytest.MonkeyPatch, kind: Any = V2AsyncScheduler, **engine: Any) -> Any:
    """Return a scheduler without vLLM's below it; `engine`: as for `take_vllm_out`."""
    take_vllm_out(monkeypatch, is_async=kind is V2AsyncScheduler, **engine)
    return kind()


def ahead(lengths: Sequence[int], *, runs_block: bool = True, **fields: Any) -> Plan:
    """Return a plan in which the next step verifies so many drafts of each request."""
    return Plan(np.full(len(lengths), runs_block), WIDTH * runs_block, np.array(lengths), **fields)


def plan_always(monkeypatch: pytest.MonkeyPatch, *lengths: int, **fields: Any) -> list[Any]:
    """Make every new plan this one; return what the planner was asked."""
    asked: list[Any] = []

    def plan(self: Any, *what: Any, steps: int) -> Plan:
        asked.append(what)
        return ahead(lengths, **fields)

    monkeypatch.setattr(Planner, "plan", plan)
    return asked


def schedule(scheduler: Any, *names: str) -> Any:
    """Schedule a step in which each request has one row."""
    scheduled, _ = step(dict.fromkeys(names, 0), {})
    scheduler._update_after_schedule(scheduled)
    return scheduled
