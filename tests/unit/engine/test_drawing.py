"""Verification that draws what plain decoding would, against plain Python; in Triton's
interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from support.drawn_tokens import Case, Step
from vllm_dflash.engine.v2.drawing import DrawingSampler, DrawingVerifier, sample_by_drawing

pytestmark = [
    pytest.mark.v2,
    # Results of rows that are not finite are not used.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=settings().max_examples // 3)
@given(
    seed=SEEDS,
    num_requests=st.integers(1, 5),
    width=st.sampled_from([1, 3, 7, 15]),
    vocab_size=st.sampled_from([1, 2, 9, 300]),
    in_parts=st.booleans(),
    use_fp64=st.booleans(),
)
def test_tokens_are_drawn_and_drafts_accepted_as_by_hand(
    seed: int,
    num_requests: int,
    width: int,
    vocab_size: int,
    in_parts: bool,
    use_fp64: bool,
) -> None:
    """Requests that decode, at several temperatures, beside some in their prompts."""
    step = Step(Case(num_requests, width, vocab_size, use_fp64), seed)
    found, expected = step.check(in_parts=in_parts)
    assert found == expected


def greedy(logits: torch.Tensor, *drafts: int) -> tuple[list[int], int]:
    """Return the tokens of a request at temperature 0 with these logits and drafts, and how many
    drafts are rejected."""
    count = len(logits)
    step = Step(Case(1, max(count - 1, 1), 4), 0)
    step.logits, step.temperatures[:], step.prefill_lens[:] = logits, 0.0, 1
    step.rows, step.positions = np.arange(count), 1 + np.arange(count)
    step.ends, step.seq_lens = np.array([0, count], np.int32), np.array([1 + count], np.int32)
    step.row_slots, step.tokens = step.slots.repeat(count), np.array([3, *drafts], np.int32)
    found = step.verify()
    (sampled,), number = found.sampled.tolist(), int(found.num_sampled[0])
    return sampled[:number], int(found.num_rejected[0])


def test_a_draft_that_is_no_token_is_never_accepted() -> None:
    logits = torch.eye(4)[[2, 0, 1]]
    assert greedy(logits, 2, 0) == ([2, 0, 1], 0)
    assert greedy(logits, 2, -1) == ([2, 0], 1)
    assert greedy(logits, -1, 0) == ([2], 2)


@given(SEEDS)
def test_a_row_draws_the_same_in_any_batch(seed: int) -> None:
    """Seed and position decide it, whatever is drafted and whoever else is there."""
    step = Step(Case(4, 3, 50), seed)
    whole = step.verify().drawn.tolist()
    row = int(step.random.integers(0, len(step.rows)))
    slot, position = step.row_slots[row], step.positions[step.rows[row]]
    alone = Step(Case(1, 1, 50), seed)
    alone.temperatures, alone.seeds, alone.prefill_lens = (
        np.full(4, each[slot]) for each in (step.temperatures, step.seeds, step.prefill_lens)
    )
    alone.logits, alone.slots = step.logits[row : row + 1], np.array([2])
    alone.row_slots, alone.rows, alone.tokens = (
        alone.slots,
        np.zeros(1, np.int64),
        np.array([5], np.int32),
    )
    alone.positions, alone.ends = np.array([position]), np.array([0, 1], np.int32)
    assert alone.verify(in_parts=True).drawn.tolist() == [whole[row]]


# --- where vLLM's own verifier is replaced -------------------------------------------------------


def whole(**own: Any) -> Any:
    """Return vLLM's verifier with what an engine's has; `own`: what its sampler has, or itself."""
    of_itself: dict[str, Any] = {
        "use_block_verification": False,
        "watermark_key": None,
        "synthetic_conditional_rates": None,
    }
    made: Any = object.__new__(RejectionSampler)
    vars(made).update({name: own.pop(name, value) for name, value in of_itself.items()})
    if "fly_window_size" in own:
        made.fly_window_size = own.pop("fly_window_size")
    step = Step(Case(1, 3, 9), 0)
    made.sampler = step.verifier().sampler
    made.num_speculative_steps, made.enable_adaptive_verification = 3, False
    defaults = {"compute_nans": False, "return_sampling_mask": False, "trace_replay_state": None}
    vars(made.sampler).update(defaults | own)
    return made


@pytest.mark.parametrize(
    ("own", "draws"),
    [
        ({}, True),
        ({"fly_window_size": 0}, True),  # of vLLM 0.33
        ({"fly_window_size": 4}, False),
        ({"use_block_verification": True}, False),
        ({"synthetic_conditional_rates": torch.ones(3)}, False),
    ],
)
def test_another_method_of_vllms_is_left_to_it(own: dict[str, Any], draws: bool) -> None:
    assert DrawingVerifier.instead_of(whole(**own)).draws is draws


class ModelsOwn(Sampler):
    """The sampler of a model, or of watermarks."""


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("is_models_own", [False, True])
def test_samplers_that_are_not_vllms_stay(shards: bool, is_models_own: bool) -> None:
    """Nor are they replaced where ranks share a batch's sampling."""
    verifier = whole()
    state = vars(verifier.sampler)
    verifier.sampler = object.__new__(ModelsOwn if is_models_own else Sampler)
    vars(verifier.sampler).update(state)
    runner: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(enable_batch_sharded_sampling=shards),
        sampler=verifier.sampler,
        rejection_sampler=verifier,
        vocab_size=9,
        dtype=torch.bfloat16,
    )
    draws = sample_by_drawing(runner)
    is_replaced = isinstance(runner.rejection_sampler, DrawingVerifier)
    assert draws == is_replaced
    assert is_replaced == (not shards and not is_models_own)
    if is_replaced:
        assert isinstance(runner.sampler, DrawingSampler)
        assert runner.rejection_sampler.sampler is runner.sampler
    else:
        assert (runner.sampler, runner.rejection_sampler) == (verifier.sampler, verifier)


@pytest.mark.parametrize(("users_own", "uploads"), [(0, [1, 0, 1, 0, 1]), (1, [1] * 5)])
def test_parameters_are_uploaded_once_for_all_new_requests(
    monkeypatch: pytest.MonkeyPatch, users_own: int, uploads: list[int]
) -> None:
    """And in the first step. A user's logits processors may count on an upload in each step."""
    added: list[tuple[Any, ...]] = []
    uploaded: list[int] = []
    monkeypatch.setattr(Sampler, "add_request", lambda _, *request: added.append(request))
    monkeypatch.setattr(Sampler, "apply_staged_writes", lambda _: uploaded.append(len(added)))
    of_vllm: Any = object.__new__(Sampler)
    of_vllm.logits_processors = [object()] * (3 + users_own)
    sampler: Any = DrawingSampler.instead_of(of_vllm)
    found = []
    for new in ([], [], [(0, "of a"), (1, "of b")], [], [(0, "of c")]):
        before = len(uploaded)
        for request in new:
            sampler.add_request(*request)
        sampler.apply_staged_writes()
        found.append(len(uploaded) - before)
    assert found == uploads
    assert added == [(0, "of a"), (1, "of b"), (0, "of c")]
    assert uploaded[-1] == 3  # not before the request is there


NEEDS: list[dict[str, Any]] = [
    {"needs_logits_processing": True},
    {"num_logprobs": 0},
    {"num_scored": 2},
    {"draft_logits": torch.zeros(1)},
    {"invalid_drafts": torch.zeros(1)},
    {"compute_nans": True},
    {"return_sampling_mask": True},
    {"trace_replay_state": object()},
]


@pytest.mark.parametrize("needs", [{}, *NEEDS], ids=lambda needs: next(iter(needs), "nothing"))
def test_only_steps_with_nothing_else_to_do_leave_out_vllms_verifier(
    monkeypatch: pytest.MonkeyPatch, needs: dict[str, Any]
) -> None:
    """One request of the batch is enough; what another slot once asked for is nothing."""
    step = Step(Case(4, 3, 9), 3)
    asks, other = step.slots[2], np.setdiff1d(np.arange(7), step.slots)[0]
    own = {name: needs[name] for name in needs if name in {*vars(whole()), *vars(whole().sampler)}}
    made: Any = DrawingVerifier.instead_of(whole(**own))
    state = step.verifier().sampler
    processing, logprobs, scored = np.zeros(7, bool), np.full(7, NO_LOGPROBS), np.zeros(7, int)
    processing[other], logprobs[other], scored[other] = True, 5, 5
    processing[asks] = needs.get("needs_logits_processing", False)
    logprobs[asks] = needs.get("num_logprobs", NO_LOGPROBS)
    scored[asks] = needs.get("num_scored", 0)
    sampler = made.sampler
    sampler.sampling_states, sampler.req_states = state.sampling_states, state.req_states
    sampler.sampling_states.num_logprobs, sampler.needs_logits_processing = logprobs, processing
    sampler.logprob_token_ids_state = SimpleNamespace(
        max_num_token_ids=lambda slots: int(scored[slots].max())
    )
    monkeypatch.setattr(RejectionSampler, "__call__", lambda *_: "vLLM's")
    found: Any = made(
        step.logits, step.batch(), needs.get("draft_logits"), needs.get("invalid_drafts")
    )
    assert made.most_scored == needs.get("num_scored", 0)
    if needs:
        assert found == "vLLM's"
        return
    assert (found.logprobs_tensors, found.num_nans) == (None, None)
    rejected, sampled = found.num_rejected.tolist(), found.sampled_token_ids.tolist()
    for tokens, count, refused, expected in zip(
        sampled, found.num_sampled.tolist(), rejected, step.by_hand(), strict=True
    ):
        assert (tokens[:count], refused) == expected
