"""Hazards of speculative decoding by name, in one engine on either model runner.

The reference says what should be written and how much each step accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

from reference.reference_drafter import ReferenceDrafter
from support.context_rows import ContextRows
from support.device_decisions import directed, drafting, prefer
from support.drafter_watch import watch_drafts
from support.engines import (
    DFLASH,
    DRAFTER,
    FIXED,
    SCHEDULING,
    TARGET,
    USES_V2,
    engine,
    fix_costs,
    greedy,
    held_out_prompts,
    prefix_cache_hits,
    proposer_of,
    scheduler_of,
)
from support.interpreter import triton_attention
from support.reference_decoding import generate
from support.reference_trees import acceptance_lengths
from support.stepped_requests import Stepped, run_by_hand
from vllm_dflash.checkpoint.read import read_drafter

pytestmark = [pytest.mark.usefixtures("runner"), pytest.mark.also_emulated]
NEW_TOKENS, LIMIT, BLOCK = 20, 160, 32
FREE = "free drafts"
"""Drafts come from blocks or texts, as the device decides; those of texts are preferred."""
TREES, NODES = "trees", 15
"""Drafts are trees, scheduled asynchronously: each step accepts what a reference's tree does."""
WINDOW, DRAFT_WINDOW = "window", 40
"""The drafter attends to the last 40 tokens."""
SLOW = [pytest.param(way, marks=pytest.mark.slow) for way in (WINDOW, TREES)]
MORE = [pytest.param(FREE, marks=pytest.mark.slow), *SLOW] if USES_V2 else [WINDOW]


class AnySteps(list[int]):
    """Equal to any list of steps: the reference has no free drafts."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list)

    __hash__ = None


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Three short ones and one of 150 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    encoded = [tokenizer.encode(prompt) for prompt in held_out_prompts(25)]
    return [encoded[0], encoded[6], encoded[24], encoded[9][:150]]


@pytest.fixture(scope="module", params=["synchronous", *MORE])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(way: str) -> Callable[..., tuple[list[int], list[int]]]:
    """A function that returns a prompt's continuation and the number of tokens of each step."""
    target = Qwen3ForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    spec = read_drafter(str(DRAFTER))
    if way == WINDOW:
        spec = spec.model_copy(update={"draft_window": DRAFT_WINDOW})
    drafter = ReferenceDrafter.load(spec, DRAFTER).float()
    known: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}

    def look_up(prompt: list[int], new_tokens: int = NEW_TOKENS) -> tuple[list[int], list[int]]:
        key = (new_tokens, *prompt)
        if key not in known:
            found = generate(target, drafter, prompt, new_tokens, whole_blocks=USES_V2)
            steps: list[int] = AnySteps() if way == FREE else []
            lengths = found.acceptance_lengths
            if way == TREES:
                lengths = acceptance_lengths(target, drafter, prompt, found.tokens, NODES)
            for accepted in [1, *lengths, *[1] * new_tokens]:
                steps.append(min(accepted, new_tokens - sum(steps)))
            known[key] = found.tokens[:new_tokens], type(steps)(step for step in steps if step)
        return known[key]

    return look_up


@pytest.fixture(scope="module")
def shared(way: str) -> Iterator[LLM]:
    settings: dict[str, Any] = {"max_model_len": LIMIT, "max_num_seqs": 3}
    settings |= {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 24}
    speculative: dict[str, Any] = dict(FIXED)
    with pytest.MonkeyPatch.context() as patch:
        if way == FREE:
            speculative = dict(DFLASH)
            fix_costs(patch)
        if way == TREES:
            speculative["draft_tree"] = NODES
        if way == WINDOW:
            speculative["draft_window"] = DRAFT_WINDOW
        scheduling = way if way in SCHEDULING else SCHEDULING[-1]
        attention = triton_attention() if way == TREES else nullcontext()
        with attention, engine(scheduling, speculative_config=speculative, **settings) as llm:
            if way == FREE:
                prefer(llm, text=0.95, block=0.9)
                directed(llm, patch, lambda most: drafting(most, runs_block=True))
            yield llm
            (stats,) = llm.collective_rpc("dflash_stats")
            assert way != FREE or stats["free_draft_tokens"] > 0


either_way = pytest.mark.parametrize(
    "way", [*SCHEDULING, *([FREE, *SLOW] if USES_V2 else MORE)], indirect=True
)
"""Asynchronous scheduling runs a step while another is scheduled or a request leaves."""


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The engine as after its start. Afterwards, check that the test left it in order."""
    assert shared.reset_prefix_cache()
    yield shared
    core = shared.llm_engine
    core.abort_request(list(core.output_processor.external_req_ids))  # of a test that failed
    pool = scheduler_of(shared).kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
    (stats,) = shared.collective_rpc("dflash_stats")
    assert stats["nan_drafts"] == 0
    assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0


def params(new_tokens: int = NEW_TOKENS) -> SamplingParams:
    return greedy(new_tokens, ignore_eos=True)


def serve(
    llm: LLM, prompts: list[list[int]], new_tokens: int = NEW_TOKENS
) -> list[tuple[list[int], list[int]]]:
    """Return each prompt's tokens and how many each step brought, in the form of `expected`."""
    stepped = run_by_hand(llm, prompts, params(new_tokens))
    return [(stepped.tokens(name), stepped.counts(name)) for name in stepped.steps]


def plain_hits(prompts: list[list[int]]) -> int:
    """Return how many tokens plain vLLM finds in its cache: full blocks without the last token."""
    return sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)


def test_hazard_1_cached_prefixes_bring_the_drafters_context(
    llm: LLM, prompts: list[list[int]], expected: Any
) -> None:
    wanted = [expected(prompt) for prompt in prompts[:3]]
    assert max(max(steps) for _, steps in wanted) > 3
    before = prefix_cache_hits(llm)
    assert serve(llm, prompts[:3]) == wanted
    assert prefix_cache_hits(llm) == before
    assert serve(llm, prompts[:3]) == wanted
    assert prefix_cache_hits(llm) - before == plain_hits(prompts[:3]) > 0


def test_hazard_1_prefixes_that_are_shared_or_evicted(
    llm: LLM, prompts: list[list[int]], expected: Any
) -> None:
    shared = [prompts[3][:70] + prompt[:5] for prompt in prompts[:3]]
    wanted = [expected(prompt) for prompt in shared]
    assert serve(llm, shared) == wanted  # at once, so that some find what others have computed
    before = prefix_cache_hits(llm)
    assert serve(llm, shared) == wanted
    assert prefix_cache_hits(llm) - before == plain_hits(shared)
    others = [[(7 * token + 3 * turn) % 300 + 1 for token in prompts[3]] for turn in range(1, 8)]
    serve(llm, others, 1)  # take more blocks than there are
    before = prefix_cache_hits(llm)
    assert serve(llm, shared) == wanted
    assert prefix_cache_hits(llm) - before < plain_hits(shared)


@either_way
def test_hazard_1_requests_thrown_out_between_two_steps(
    llm: LLM, prompts: list[list[int]], expected: Any
) -> None:
    """`reset_prefix_cache` preempts them while they have drafts, and they resume at once."""
    stepped, names = Stepped(llm), ("0", "1", "2")
    for name in names:
        stepped.add(name, prompts[int(name)], params())
    stepped.until(2, *names)
    before = {name: (stepped.tokens(name), len(stepped.steps[name])) for name in names}
    assert stepped.core.reset_prefix_cache(reset_running_requests=True)
    stepped.finish()
    for name, (written, num_steps) in before.items():
        prompt = prompts[int(name)]
        assert stepped.tokens(name) == expected(prompt)[0]
        # It continues like a new request that has all of this as its prompt.
        resumed = expected(prompt + written, NEW_TOKENS - len(written))[1]
        assert stepped.counts(name)[num_steps:] == resumed


def test_hazard_2_chunks_that_sample_nothing_store_their_context(
    llm: LLM, way: str, prompts: list[list[int]], expected: Any
) -> None:
    scheduler = scheduler_of(llm)
    wanted = [expected(prompt, 12) for prompt in prompts[:2]]
    try:
        # Smaller chunks would cut the verified drafts as well.
        least = 1 + (NODES if way == TREES else 7)
        sizes = (8, 31, 33) if USES_V2 else (8, 11, 16, 31, 32, 33)
        for size in (size for size in sizes if size >= least):
            scheduler.scheduler_config.long_prefill_token_threshold = size
            (before,) = llm.collective_rpc("dflash_stats")
            assert serve(llm, prompts[:2], 12) == wanted, size
            (after,) = llm.collective_rpc("dflash_stats")
            assert after["steps"] - before["steps"] >= len(prompts[1]) // size
            assert llm.reset_prefix_cache()
    finally:
        scheduler.scheduler_config.long_prefill_token_threshold = 0


def test_hazard_3_rejected_rows_are_never_stored(llm: LLM, prompts: list[list[int]]) -> None:
    """After every step the drafter's cache holds the context of each request and nothing else."""
    rows, stepped = ContextRows(llm), Stepped(llm)
    for number in range(3):
        stepped.add(str(number), prompts[number], params())

    def check() -> None:
        assert not rows.missing()
        assert not rows.surplus()

    try:
        stepped.finish(check)
    finally:
        rows.stop()
    assert len(rows.stored) > 3 * NEW_TOKENS


def poison(llm: LLM) -> None:
    """Fill every block of the drafter's cache with NaN."""
    for attention in proposer_of(llm).model.context.attentions:
        attention.attn.kv_cache.fill_(float("nan"))


def test_hazard_5_nan_in_all_blocks_changes_nothing(
    llm: LLM, prompts: list[list[int]], expected: Any
) -> None:
    """Unused blocks, and blocks that earlier requests have freed."""
    for _ in range(2):
        poison(llm)
        assert serve(llm, prompts[:3]) == [expected(prompt) for prompt in prompts[:3]]
        assert llm.reset_prefix_cache()


@either_way
def test_hazard_6_a_row_and_its_blocks_are_used_again_after_an_abort(
    llm: LLM, prompts: list[list[int]], expected: Any
) -> None:
    """One request leaves while it has drafts, one in the middle of its prompt."""
    stepped = Stepped(llm)
    stepped.add("decoding", prompts[0], params())
    stepped.add("0", prompts[1], params())
    stepped.until(2, "decoding")
    stepped.add("in its prompt", prompts[3], params())
    stepped.step()
    assert not stepped.steps["in its prompt"]
    stepped.core.abort_request(["decoding", "in its prompt"])
    stepped.add("1", prompts[2], params())
    stepped.add("2", prompts[0], params())
    stepped.finish()
    for name, prompt in zip("012", (prompts[1], prompts[2], prompts[0]), strict=True):
        assert (stepped.tokens(name), stepped.counts(name)) == expected(prompt)


def test_hazard_9_drafts_lie_in_blocks_of_their_request(
    llm: LLM, prompts: list[list[int]], expected: Any
) -> None:
    """Prompts that fill their last block or nearly, cold and from a cached prefix."""
    lengths = (1, 24, 25, 31, 32, 33, 63, 64, 96)
    some = [prompts[3][:length] for length in lengths]
    with watch_drafts(llm) as seen:
        for _ in range(2):
            assert serve(llm, some, 6) == [expected(prompt, 6) for prompt in some]
    assert len({draft.request for draft in seen}) == 2 * len(lengths)
    assert all(draft.written <= draft.own and 0 not in draft.written for draft in seen)
