"""Cached blocks include the drafter's context, even if their first owner never drafted.

Before that, acceptance of later hits stayed at two thirds until the block was evicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from vllm import LLM
from vllm.v1.metrics.reader import Counter

from support.context_rows import ContextRows
from support.engines import (
    DFLASH,
    engine,
    greedy,
    held_out_prompts,
    prefix_cache_hits,
    proposer_of,
)
from support.planner_world import steady_costs
from support.stepped_requests import Stepped, run_by_hand
from vllm_dflash.planning import Ints
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Plan

PARAMS = greedy(24, ignore_eos=True)


class Never(Planner):
    def plan(self, ids: Sequence[str], context_lens: Ints, max_drafts: Ints, **_: object) -> Plan:
        return Plan.without_block(len(ids))


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    with engine(speculative_config=dict(DFLASH), max_num_seqs=4, max_num_batched_tokens=96) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> LLM:
    """An engine with an empty cache, in which context waits."""
    assert shared.reset_prefix_cache()
    proposer_of(shared).start_planning(steady_costs(4))
    return shared


@pytest.fixture(scope="module")
def prompt(shared: LLM) -> list[int]:
    """A prompt of two full blocks and a bit."""
    return shared.get_tokenizer().encode("".join(held_out_prompts(3)))[:70]


def drafts(llm: LLM, policy: Planner) -> None:
    proposer_of(llm).host.planner = policy


@pytest.fixture
def expected(llm: LLM, prompt: list[int]) -> list[int]:
    """Tokens of each step from an empty cache, if each is drafted. Empties it again."""
    drafts(llm, Planner(7, 1))
    found = run_by_hand(llm, [prompt], PARAMS).counts("0")
    assert max(found) > 3
    assert llm.reset_prefix_cache()
    return found


def test_after_an_owner_that_ended_undrafted(
    llm: LLM, prompt: list[int], expected: list[int]
) -> None:
    drafts(llm, Never(7, 1))
    run_by_hand(llm, [prompt], PARAMS)
    before = prefix_cache_hits(llm)
    drafts(llm, Planner(7, 1))
    assert run_by_hand(llm, [prompt], PARAMS).counts("0") == expected
    assert prefix_cache_hits(llm) - before == 64


def test_while_an_undrafted_owner_runs(llm: LLM, prompt: list[int], expected: list[int]) -> None:
    drafts(llm, Never(7, 1))
    rows, stepped = ContextRows(llm), Stepped(llm)
    stepped.add("owner", prompt, greedy(200, ignore_eos=True))
    stepped.until(4, "owner")
    drafts(llm, Planner(7, 1))
    stepped.add("guest", prompt, PARAMS)

    def check() -> None:
        assert not rows.missing()

    stepped.finish(check)
    rows.stop()
    assert stepped.counts("guest") == expected


def test_a_prompt_that_is_cached_but_for_a_token_is_not_padded(llm: LLM, prompt: list[int]) -> None:
    """vLLM's scheduler pads such a request's first step with K drafts that were never made. For
    these a CPU kernel reads outside its tensor. Ours adds none: vLLM counts only our drafts."""
    drafts(llm, Planner(7, 1))
    run_by_hand(llm, [prompt[:65]], greedy(1))

    def counted() -> list[float]:
        """Return verified and accepted drafts, as counted by vLLM and by us."""
        by_vllm = {one.name: one.value for one in llm.get_metrics() if isinstance(one, Counter)}
        (ours,) = llm.collective_rpc("dflash_stats")
        names = ("draft_tokens", "accepted_tokens")
        return [
            *(by_vllm[f"vllm:spec_decode_num_{name}"] for name in names),
            *(ours[name] for name in names),
        ]

    before = counted()
    llm.generate([{"prompt_token_ids": prompt[:65]}], PARAMS, use_tqdm=False)
    found = [after - then for after, then in zip(counted(), before, strict=True)]
    assert found[:2] == found[2:]
    assert min(found) > 0
