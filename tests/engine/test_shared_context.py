"""Cached blocks include the drafter's context, even if their first owner never drafted.

Before that, acceptance of later hits stayed at two thirds until the block was evicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from vllm import LLM
from vllm.v1.metrics.reader import Counter

from support.context_rows import ContextRows
from support.engines import (
    DFLASH,
    acceptance_by_request,
    engine,
    greedy,
    held_out_prompts,
    prefix_cache_hits,
    proposer_of,
)
from support.planner_world import steady_costs
from support.stepped_requests import Stepped
from vllm_dflash.engine.v1.fixed_length import FixedLength
from vllm_dflash.planning import Ints
from vllm_dflash.planning.step import Plan

pytestmark = pytest.mark.engine
NEW_TOKENS = 24


class Never(FixedLength):
    def plan(self, ids: Sequence[str], context_lens: Ints, max_drafts: Ints, **_: object) -> Plan:
        return Plan.without_block(len(ids))


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    with engine(speculative_config=dict(DFLASH), max_num_seqs=4, max_num_batched_tokens=96) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> LLM:
    assert shared.reset_prefix_cache()
    proposer_of(shared).start_planning(steady_costs(4))
    return shared


@pytest.fixture(scope="module")
def prompt(shared: LLM) -> list[int]:
    """A prompt of two full blocks and a bit."""
    text = "".join(held_out_prompts(3))
    return shared.get_tokenizer().encode(text)[:70]


def drafts(llm: LLM, policy: FixedLength) -> None:
    proposer_of(llm).host.planner = policy


def acceptance(llm: LLM, prompt: list[int]) -> list[int]:
    """Return the tokens of each verify step of a request that drafts in every step."""
    drafts(llm, FixedLength(7))
    statistics = proposer_of(llm).host.statistics
    original = statistics.count_verified
    lengths = acceptance_by_request(llm)
    run(llm, prompt)
    statistics.count_verified = original
    (only,) = lengths.values()
    return only


def run(llm: LLM, *prompts: list[int], new_tokens: int = NEW_TOKENS) -> None:
    requests: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    llm.generate(requests, greedy(new_tokens, ignore_eos=True), use_tqdm=False)


@pytest.fixture(scope="module")
def expected(shared: LLM, prompt: list[int]) -> list[int]:
    """Acceptance from an empty cache."""
    assert shared.reset_prefix_cache()
    proposer_of(shared).start_planning(steady_costs(4))
    found = acceptance(shared, prompt)
    assert max(found) > 3
    return found


def test_after_an_owner_that_ended_undrafted(
    llm: LLM, prompt: list[int], expected: list[int]
) -> None:
    drafts(llm, Never(7))
    run(llm, prompt)
    before = prefix_cache_hits(llm)
    assert acceptance(llm, prompt) == expected
    assert prefix_cache_hits(llm) - before == 64


def test_while_an_undrafted_owner_runs(llm: LLM, prompt: list[int], expected: list[int]) -> None:
    drafts(llm, Never(7))
    rows = ContextRows(llm)
    stepped = Stepped(llm)
    stepped.add("owner", prompt, greedy(200, ignore_eos=True))
    stepped.until(4, "owner")
    drafts(llm, FixedLength(7))
    lengths = acceptance_by_request(llm)
    stepped.add("guest", prompt, greedy(NEW_TOKENS, ignore_eos=True))

    def check() -> None:
        assert not rows.missing()

    stepped.finish(check)
    rows.stop()
    (guest,) = [steps for name, steps in lengths.items() if name.startswith("guest")]
    assert guest == expected


def test_a_prompt_that_is_cached_but_for_a_token_is_not_padded(llm: LLM, prompt: list[int]) -> None:
    """vLLM's scheduler pads such a request's first step with K drafts that were never made. For
    these a CPU kernel reads outside its tensor. Ours adds none: vLLM counts only our drafts."""
    drafts(llm, FixedLength(7))
    run(llm, prompt[:65], new_tokens=1)

    def counted() -> list[tuple[float, int]]:
        """Return verified and accepted drafts, as counted by vLLM and by us."""
        by_vllm = {one.name: one.value for one in llm.get_metrics() if isinstance(one, Counter)}
        (ours,) = llm.collective_rpc("dflash_stats")
        names = ("draft_tokens", "accepted_tokens")
        return [(by_vllm[f"vllm:spec_decode_num_{name}"], ours[name]) for name in names]

    before = counted()
    run(llm, prompt[:65])
    verified, accepted = (
        (vllm - vllm_before, ours - ours_before)
        for (vllm, ours), (vllm_before, ours_before) in zip(counted(), before, strict=True)
    )
    assert verified[0] == verified[1] > 0
    assert accepted[0] == accepted[1] > 0
