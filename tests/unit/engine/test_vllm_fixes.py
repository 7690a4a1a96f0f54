"""Our fixes of vLLM are applied where they are needed, and nowhere else."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.worker import mamba_utils
from vllm.v1.worker.gpu.sample import sampler as vllms_sampler
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_dflash.engine.v1.v1_fixes import aligned_states
from vllm_dflash.engine.v1.v1_fixes.thinking_budgets import sync_batch, update_think_state
from vllm_dflash.engine.vllm_fixes import gathered_ids
from vllm_dflash.engine.vllm_fixes.amx_permission import ask_for_amx
from vllm_dflash.engine.vllm_fixes.repeated_uploads import NUM_OF_VLLM
from vllm_dflash.engine.vllm_fixes.short_rotary_tables import cover_positions
from vllm_dflash.engine.vllm_fixes.sliding_sinks import fix_sliding_sinks
from vllm_dflash.engine.vllm_fixes.stopped_sessions import SessionScheduler
from vllm_dflash.engine.vllm_fixes.undrafted_graphs import fix_undrafted_graphs


@pytest.mark.parametrize("has_it", [True, False])
def test_permission_for_amx_is_asked_where_there_is_amx(
    monkeypatch: pytest.MonkeyPatch, has_it: bool
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_it)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True))
    ask_for_amx()
    assert asked == [True] * has_it


def test_states_at_the_ends_of_blocks_go_to_those_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has its own block table. Blocks have 8 tokens. A step: column, tokens before it,
    rows, drafts, and tokens kept."""
    steps = [
        (1, 9, 4, 3, 2),  # does not reach the end of a block
        (1, 9, 4, 3, 4),  # 10 tokens with the bonus token, 13 kept: no block ends
        (2, 13, 4, 3, 4),  # 14 and 17: the end is at 16, 2 rows after the bonus token's
        (1, 12, 4, 3, 4),  # 13 and 16: exactly to the end, in the same column
        (1, 12, 4, 0, 1),  # a chunk of a prompt that ends there
    ]
    columns, computed, rows, drafted, kept = zip(*steps, strict=True)
    names = ("mamba_state_idx", "num_computed_tokens", "num_scheduled_tokens", "num_draft_tokens")
    numbers = (columns, computed, rows, drafted)
    staged = SimpleNamespace(block_size=8)
    for name, values in zip(names, numbers, strict=True):
        setattr(staged, f"{name}_buf", SimpleNamespace(np=torch.tensor(values).numpy()))
    copies: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        mamba_utils,
        "collect_mamba_copy_meta",
        lambda *args: copies.append((*args[4:7], *args[7].block_ids[3])),
    )
    monkeypatch.setattr(mamba_utils, "do_mamba_copy_block", lambda _: None)
    accepted = torch.zeros(len(steps), dtype=torch.int32)
    table = SimpleNamespace(get_numpy_array=lambda: torch.arange(20, 25)[:, None].numpy())
    aligned_states.postprocess_mamba_align_gpu(
        bufs=SimpleNamespace(
            postprocess_align=staged, preprocess=SimpleNamespace(mamba_group_ids=[3], offset=0)
        ),
        num_reqs=len(steps),
        num_accepted_tokens_gpu=torch.tensor(kept),
        num_accepted_tokens_cpu_tensor=accepted,
        input_batch=SimpleNamespace(block_table={3: table}),
        kv_cache_config=None,
        forward_context={},
        mamba_state_copy_funcs=None,
    )
    assert copies == [(2, 1, 2, 22), (1, 1, 3, 23), (1, 1, 0, 24)]
    assert accepted.tolist() == [2, 4, 4, 1, 1]


def test_integers_are_gathered_as_floating_point_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is for 64 bits, and they come back unchanged. All else is gathered as it is."""
    seen: list[torch.dtype] = []

    def gather(output: torch.Tensor, given: torch.Tensor, group: Any) -> None:
        seen.append(given.dtype)
        output.copy_(torch.cat([given, given]))

    shared = SimpleNamespace(handle=1, all_gather_into_tensor=gather)
    for found in (shared, torch.distributed, None):
        group = SimpleNamespace(device_communicator=SimpleNamespace(dist_module=found))
        monkeypatch.setattr(gathered_ids, "get_tp_group", lambda group=group: group)
        gathered_ids.fix_gathered_ids()
    ids = torch.tensor([[3, -1, 1 << 40], [7, 2, 0]])
    for given in (ids, ids.T, ids.float()):
        output = torch.zeros(2 * len(given), *given.shape[1:], dtype=given.dtype)
        shared.all_gather_into_tensor(output, given, group=None)
        assert torch.equal(output, torch.cat([given, given]))
    assert seen == [torch.float32] * 3


def test_every_table_of_rotations_is_as_long_as_the_target() -> None:
    """Above all YaRN's, which has a class of its own. Tables that are long enough do not change."""

    class Yarn(RotaryEmbedding):
        def __init__(self, rows: int) -> None:
            torch.nn.Module.__init__(self)
            self.cos_sin_cache = torch.arange(2.0 * rows).view(rows, 2)

    tables = Yarn(3), Yarn(6)
    cover_positions(torch.nn.ModuleList([*tables, torch.nn.Linear(1, 1)]), 5)
    short, long = (table.cos_sin_cache.tolist() for table in tables)
    assert short == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [4.0, 5.0], [4.0, 5.0]]
    assert len(long) == 6


@pytest.mark.parametrize(
    ("layers", "is_set"),
    [
        ([(None, True), (128, True)], True),
        ([(None, True), (128, False)], True),  # the drafter has no sinks
        ([(None, False), (128, False)], False),
        ([(128, True), (128, True)], False),
    ],
)
def test_keys_are_not_split_where_windows_and_sinks_meet(
    monkeypatch: pytest.MonkeyPatch, layers: list[tuple[int | None, bool]], is_set: bool
) -> None:
    monkeypatch.delenv("VLLM_CPU_ATTN_SPLIT_KV", raising=False)
    attentions: dict[str, Any] = {}
    for number, (window, has_sink) in enumerate(layers):
        layer = object.__new__(Attention)
        torch.nn.Module.__init__(layer)
        layer.sliding_window, layer.has_sink = window, has_sink
        attentions[str(number)] = layer
    attentions["of another kind"] = SimpleNamespace()
    compilation = SimpleNamespace(static_forward_context=attentions)
    fix_sliding_sinks(SimpleNamespace(compilation_config=compilation))
    found = os.environ.pop("VLLM_CPU_ATTN_SPLIT_KV", None)
    assert found == ("0" if is_set else None)


def test_who_takes_a_place_inherits_no_budget() -> None:
    """Requests 0 and 3 have budgets. The last request moves to 0, and 3 moves to 1."""
    holder: Any = SimpleNamespace(is_enabled=True, _state={0: "of 0", 3: "of 3"})
    one_way = MoveDirectionality.UNIDIRECTIONAL
    moved = [(4, 0, one_way), (3, 1, one_way)]
    sync_batch(holder, BatchUpdate(2, removed=[2], added=[], moved=moved))
    assert holder._state == {1: "of 3"}
    sync_batch(holder, BatchUpdate(2, [], [], [(0, 1, MoveDirectionality.SWAP)]))
    assert holder._state == {0: "of 3"}
    sync_batch(holder, None)
    assert holder._state == {0: "of 3"}


def test_what_was_forced_in_a_step_is_forgotten_with_it() -> None:
    holder = ThinkingBudgetStateHolder(None, 4, 7, torch.device("cpu"), False)
    state = holder._init_state_entry([5], 3) | {"bonus_token_forced": True}
    update_think_state(holder, state)
    assert state["bonus_token_forced"] is False


def test_a_turn_that_has_ended_is_given_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    def hand_out(self: Any, drafts: DraftTokenIds) -> None:
        for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            if name in self.requests:
                self.requests[name].spec_token_ids = tokens

    monkeypatch.setattr(Scheduler, "update_draft_token_ids", hand_out)
    scheduler: Any = SessionScheduler.__new__(SessionScheduler)
    states = {"runs": RequestStatus.RUNNING, "waits": RequestStatus.WAITING_FOR_STREAMING_REQ}
    scheduler.requests = {
        name: SimpleNamespace(status=status, spec_token_ids=[]) for name, status in states.items()
    }
    scheduler.update_draft_token_ids(DraftTokenIds(["runs", "waits", "gone"], [[1], [2], [3]]))
    assert {n: one.spec_token_ids for n, one in scheduler.requests.items()} == {
        "runs": [1],
        "waits": [],
    }


@pytest.mark.parametrize(("is_adaptive", "most_rows"), [(True, 8), (False, 16)])
def test_metadata_keeps_to_the_bound_of_its_graph(is_adaptive: bool, most_rows: int) -> None:
    """The bound is that of all graphs with adaptive verification, else the rows of the graph."""
    graphs = CUDAGraphMode.FULL_AND_PIECEWISE if is_adaptive else CUDAGraphMode.FULL
    state: Any = SimpleNamespace(prepare_attn=lambda batch, *_, **__: batch.max_query_len)
    runner: Any = SimpleNamespace(
        model_state=state,
        decode_query_len=8,
        adaptive_verification=object() if is_adaptive else None,
        cudagraph_manager=SimpleNamespace(cudagraph_mode=graphs),
    )
    fix_undrafted_graphs(runner)
    batch: Any = SimpleNamespace(max_query_len=None, num_tokens_after_padding=16)
    found = state.prepare_attn(batch, CUDAGraphMode.FULL, (), for_capture=False)
    assert found == most_rows
    batch.max_query_len = None
    assert state.prepare_attn(batch, CUDAGraphMode.PIECEWISE, ()) is None


@pytest.mark.parametrize("users_own", [0, 1])
def test_a_users_logits_processors_are_told_from_vllms(
    monkeypatch: pytest.MonkeyPatch, users_own: int
) -> None:
    """Their number tells, which must be that of the vLLM installed."""
    for name in (
        *("SamplingStates", "LogitsProcRequestState", "PenaltiesState", "LogitBiasState"),
        *("BadWordsState", "LogprobTokenIdsState", "ThinkingBudgetState"),
    ):
        monkeypatch.setattr(vllms_sampler, name, MagicMock())
    nothing: Any = MagicMock()
    own: Any = [MagicMock()] * users_own
    sampler = Sampler(nothing, 4, 9, torch.device("cpu"), nothing, custom_logits_processors=own)
    assert (len(sampler.logits_processors) == NUM_OF_VLLM) == (not users_own)
