"""Combined settings: every two values of two settings meet in some engine.

Each engine gets requests of all kinds at once, twice. `support/combined_settings.py` works out the
combinations. The name of a failing test says which of its settings are unusual.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from vllm import LLM, RequestOutput
from vllm.model_executor.kernels.linear.scaled_mm import cpu as scaled_mm
from vllm.outputs import CompletionOutput

from support.combined_settings import (
    COMBINATIONS,
    LONG,
    SHORT,
    described,
    engine_settings,
    speculative_config,
)
from support.engines import USES_V2, engine, fix_costs, scheduler_of
from support.interpreter import triton_attention
from support.mixed_requests import (
    TOP_K,
    Answers,
    Asked,
    mixed_requests,
    serve,
    victims,
)
from vllm_dflash.config.engine_options import MOST_FREE_DRAFTS

pytestmark = [pytest.mark.usefixtures("runner"), pytest.mark.slow]  # half a minute each
ROUNDS = 1 if USES_V2 else 2
"""In the second round, prefixes are cached, requests were answered and costs were learned."""


@pytest.fixture(scope="module")
def plain() -> Callable[[str], Answers]:
    """Plain decoding's answers to all requests that are not drawn, by the type of its cache."""
    known: dict[str, Answers] = {}

    def answers(dtype: str) -> Answers:
        if dtype not in known:
            asked = {one.name: one for limit in (SHORT, LONG) for one in mixed_requests(limit)}
            settings = engine_settings({"limit": "long", "cache dtype": dtype})
            with engine(**settings) as llm:
                greedy = [one for one in asked.values() if not one.is_drawn]
                known[dtype] = serve(llm, greedy, {}, has_priorities=False)
        return known[dtype]

    return answers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of drafters. Engines plan alike each time."""
    fix_costs(monkeypatch)
    # On CPUs with AMX, the kernel that vLLM picks for quantised layers does not support float32.
    monkeypatch.setattr(scaled_mm, "check_cpu_sgl_kernel", lambda *_: False)
    return tmp_path


@pytest.mark.parametrize("combination", COMBINATIONS, ids=described)
def test_every_two_settings(
    combination: dict[str, str], plain: Callable[[str], Answers], folder: Path
) -> None:
    """The text is plain decoding's, and the engine is in order afterwards."""
    expected = plain(combination["cache dtype"])
    settings = engine_settings(combination)
    limit: int = settings["max_model_len"]
    asked, leaving = mixed_requests(limit), victims(limit)
    has_priorities = combination.get("policy") == "priority"
    with ExitStack() as stack:
        if combination.get("draft_tree", "off") != "off":
            stack.enter_context(triton_attention())
        speculative = speculative_config(combination, folder)
        way = combination.get("scheduling", "synchronous")
        llm = stack.enter_context(engine(way, speculative_config=speculative, **settings))
        for number in range(ROUNDS):
            answers = serve(llm, asked, leaving, has_priorities)
            assert answers.hung_up == {one.name for one in leaving.values()}
            for one in asked:
                where = f"{one.name}, round {number}"
                if one.is_drawn and not USES_V2:  # V2 draws what plain decoding draws
                    check_drawn(one, answers.by_name[one.name], where)
                else:
                    check_answer(
                        answers.by_name[one.name],
                        cut_to(expected.by_name[one.name], limit - len(one.prompt)),
                        where,
                        has_same_logprobs=combination.get("logprobs_mode", "raw") == "raw",
                    )
                if combination["metrics"] == "per request":
                    check_metrics(one, answers.by_name[one.name], where)
        check_counters(llm, combination)
        check_order(llm)


class Expected(NamedTuple):
    """Expected result of one sequence."""

    tokens: list[int]
    text: str | None
    """None if it was cut."""
    ended: str | None
    logprobs: list[dict[int, float]] | None


def cut_to(answer: RequestOutput, room: int) -> list[Expected]:
    """Return what the answer would be with room for `room` tokens."""
    expected = []
    for one in answer.outputs:
        tokens, values = list(one.token_ids), logprobs_of(one)
        if len(tokens) <= room:
            expected.append(Expected(tokens, one.text, one.finish_reason, values))
        else:
            expected.append(Expected(tokens[:room], None, "length", values and values[:room]))
    return expected


def logprobs_of(one: CompletionOutput) -> list[dict[int, float]] | None:
    if one.logprobs is None:
        return None
    return [{token: of.logprob for token, of in row.items()} for row in one.logprobs]


def check_answer(
    answer: RequestOutput, expected: list[Expected], where: str, *, has_same_logprobs: bool
) -> None:
    """Check that an answer is plain decoding's."""
    for ours, plains in zip(answer.outputs, expected, strict=True):
        assert list(ours.token_ids) == plains.tokens, where
        assert plains.text in (None, ours.text), where
        assert ours.finish_reason == plains.ended, where
        found = logprobs_of(ours)
        assert (found is None) == (plains.logprobs is None), where
        if found is None or plains.logprobs is None:
            continue
        assert len(found) == len(plains.tokens), where
        for got, wanted in zip(found, plains.logprobs, strict=True):
            assert not has_same_logprobs or got == pytest.approx(wanted, abs=1e-4), where


def check_drawn(asked: Asked, answer: RequestOutput, where: str) -> None:
    """Check that a drawn answer has an allowed length and tokens that may be drawn."""
    for one in answer.outputs:
        assert one.logprobs is not None
        assert len(one.logprobs) == len(one.token_ids), where
        assert one.finish_reason in ("stop", "length"), where
        is_long = len(one.token_ids) == asked.params.max_tokens
        assert is_long == (one.finish_reason == "length"), where
        for token, row in zip(one.token_ids, one.logprobs, strict=True):
            assert row[token].logprob > -30.0, where
            rank = row[token].rank or 0
            is_penalised = asked.params.presence_penalty != 0.0
            assert is_penalised or 1 <= rank <= TOP_K, where


def check_metrics(asked: Asked, answer: RequestOutput, where: str) -> None:
    """Check vLLM's counts of a request's own drafts."""
    for one in answer.outputs:
        found = one.spec_decode_metrics
        if isinstance(one.stop_reason, str):  # stopped by the front end, which knows none
            continue
        assert found is not None, where
        assert len(found.histogram) == found.num_spec_tokens + 1, where
        accepted, drafted = found.per_step_accepted, found.per_step_drafted
        assert len(accepted) == len(drafted) == sum(found.histogram), where
        assert all(a <= d <= found.num_spec_tokens for a, d in zip(accepted, drafted, strict=True))
        assert sum(drafted) == found.num_draft_tokens, where
        # Tokens accepted after a stop are not in its text.
        assert sum(accepted) < len(one.token_ids) + MOST_FREE_DRAFTS, where


def check_counters(llm: LLM, combination: dict[str, str]) -> None:
    """Check that no part is more than the whole."""
    (stats,) = llm.collective_rpc("dflash_stats")
    where = {name: value for name, value in stats.items() if isinstance(value, int)}
    assert stats["draft_tokens"] >= stats["accepted_tokens"] > 0, where
    assert stats["draft_tokens"] >= stats["free_draft_tokens"], where
    assert stats["free_draft_tokens"] >= stats["free_accepted_tokens"], where
    assert stats["accepted_tokens"] >= stats["free_accepted_tokens"], where
    assert stats["draft_tokens"] >= stats["verifications"] >= stats["free_verifications"], where
    assert stats["steps"] >= stats["drafted_steps"] + stats["skipped_steps"], where
    assert stats["drafted_steps"] >= stats["probes"], where
    counts = stats["draft_lengths"]
    assert stats["drafted_requests"] == sum(counts), where
    assert stats["planned_tokens"] == sum(n * count for n, count in enumerate(counts)), where
    assert stats["nan_drafts"] == 0, where
    assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0, where
    if combination["free_drafts"] == "off" or combination["draft_length"] == "fixed":
        assert stats["free_draft_tokens"] == 0, where
    if combination.get("scheduler", "ours") == "ours":
        of_scheduler = scheduler_of(llm).statistics
        for name in ("free_draft_tokens", "free_accepted_tokens"):
            assert getattr(of_scheduler, name) <= stats[name], where


def check_order(llm: LLM) -> None:
    """Check that no request is left, and none of its blocks."""
    assert not scheduler_of(llm).requests
    pool = scheduler_of(llm).kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
