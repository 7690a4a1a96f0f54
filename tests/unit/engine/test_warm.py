"""Hazard 10: changes after warm-up are counted."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.compilation.counter import compilation_counter
from vllm.v1.sample.sampler import Sampler

from vllm_dflash.engine.v1.proposer import LOGPROB_RANK_CODE
from vllm_dflash.engine.v2.draft_slots import Batch, Drafts
from vllm_dflash.engine.v2.speculator import ASSIGN_BUDGET, PlannedSpeculator
from vllm_dflash.engine.v2.trees.draft_trees import DraftTrees
from vllm_dflash.engine.warm import WarmState


def test_buffers_that_move_or_are_new_are_counted_once() -> None:
    holder = SimpleNamespace(one=torch.zeros(4), other=torch.zeros(4), size=4)
    state = WarmState(lambda: (None, holder))
    holder.one = torch.zeros(5)  # allowed before warm-up has ended
    state.seal()
    assert state.to_dict() == {"captures_after_warmup": 0, "reallocations_after_warmup": 0}
    kept = holder.other  # keeps the new buffer from getting its memory
    holder.other = torch.zeros(4)
    assert kept.data_ptr() != holder.other.data_ptr()
    assert state.to_dict()["reallocations_after_warmup"] == 1
    holder.new = torch.zeros(4)
    assert state.to_dict()["reallocations_after_warmup"] == 2


def test_what_graphs_read_and_write_is_counted_if_it_moves() -> None:
    """Candidates of trees, from which the next ones grow; which requests a batch has; a drafter's
    candidates, and confidences."""
    trees = DraftTrees(2, 3, 4, 4, torch.device("cpu"))
    speculator: Any = object.__new__(PlannedSpeculator)
    batch = speculator.batch = Batch.allocate(2, *torch.zeros(3, 2))
    speculator.trees = trees
    speculator.input_buffers = speculator.slots = speculator.free_drafts = None
    drafts = speculator.drafts = Drafts(*torch.zeros(3, 2, 3))
    speculator.candidates = SimpleNamespace(scores=torch.zeros(2))
    state = WarmState(speculator._owners)
    state.seal()
    assert state.to_dict()["reallocations_after_warmup"] == 0
    kept = trees.candidates
    trees.candidates = kept._replace(tokens=kept.tokens.clone())
    assert state.to_dict()["reallocations_after_warmup"] == 1
    speculator.batch = batch._replace(slots=batch.slots.clone())
    assert state.to_dict()["reallocations_after_warmup"] == 2
    speculator.drafts = drafts._replace(confidence=drafts.confidence.clone())
    assert state.to_dict()["reallocations_after_warmup"] == 3
    scores = speculator.candidates.scores
    speculator.candidates.scores = scores.clone()
    assert state.to_dict()["reallocations_after_warmup"] == 4


def test_captures_and_compilations_are_counted() -> None:
    state = WarmState(tuple)
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2))
    state.seal()
    assert state.to_dict()["captures_after_warmup"] == 0
    compilation_counter.num_cudagraph_captured += 1
    torch.compile(lambda x: x * 3 + 2, backend="eager")(torch.zeros(2))
    compiled = state.to_dict()["captures_after_warmup"]
    compilation_counter.num_cudagraph_captured -= 1
    assert compiled == 2


def test_what_plain_engines_compile_for_logprobs_is_not_counted() -> None:
    state = WarmState(tuple, late=LOGPROB_RANK_CODE)
    state.seal()
    for rows in (1, 3):
        token_ids = torch.zeros(rows, dtype=torch.int64)
        Sampler.gather_logprobs(torch.zeros(rows, 8), 1, token_ids)
    assert state.to_dict()["captures_after_warmup"] == 0
    torch.compile(lambda x: x * 7 + 3, backend="eager")(torch.zeros(2))
    assert state.to_dict()["captures_after_warmup"] == 1


def test_what_vllm_compiles_for_adaptive_verification_is_not_counted() -> None:
    """It does so within the first requests: for one, for several, for a budget of one draft."""
    assert ASSIGN_BUDGET is not None
    state = WarmState(tuple, late=ASSIGN_BUDGET.__code__)
    state.seal()
    assign = torch.compile(ASSIGN_BUDGET, backend="eager", dynamic=True)
    chances = torch.full((8, 7), 0.5)
    for count, budget in ((1, 3), (3, 7), (3, 1)):
        capacities = torch.full((count,), 7, dtype=torch.int32)
        assign(chances, torch.arange(count), capacities, budget, 7)
        assert int(capacities.sum()) == budget
    assert state.to_dict()["captures_after_warmup"] == 0


def test_compilations_are_counted_once_however_many_engines_there_were() -> None:
    """Also after `torch._dynamo.reset`, which forgets its listeners."""
    states = [WarmState(tuple) for _ in range(3)]
    torch._dynamo.reset()
    for state in states:
        state.seal()
    torch.compile(lambda x: x * 5 + 1, backend="eager")(torch.zeros(2))
    assert [state.to_dict()["captures_after_warmup"] for state in states] == [1, 1, 1]


def test_it_counts_where_nothing_is_compiled() -> None:
    """TORCHDYNAMO_DISABLE=1, which people set to look for faults: engines start as usual."""
    code = (
        "from vllm_dflash.engine.v1.proposer import LOGPROB_RANK_CODE\n"
        "from vllm_dflash.engine.warm import WarmState\n"
        "state = WarmState(tuple, late=LOGPROB_RANK_CODE)\n"
        "state.seal()\n"
        "print(state.to_dict()['captures_after_warmup'])"
    )
    command, environment = [sys.executable, "-c", code], os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "0"
