"""Combined settings: every two values of two settings meet in some engine.

Each engine gets mixtures of requests, as in `test_crossed_requests.py`, some at the context limit.
`support/combined_settings.py` works out the combinations. The name of a failing test says which of
its settings are unusual.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from vllm import LLM
from vllm.model_executor.kernels.linear.scaled_mm import cpu as scaled_mm

from support.combined_settings import (
    COMBINATIONS,
    described,
    engine_settings,
    speculative_config,
)
from support.crossed_requests import (
    PROMPTS,
    Answer,
    Crossed,
    Mixture,
    answer_alone,
    check_order,
    mixture,
    serve,
    wrong_answers,
)
from support.engines import USES_V2, engine, fix_costs, greedy, scheduler_of
from support.interpreter import triton_attention

pytestmark = [pytest.mark.usefixtures("runner"), pytest.mark.slow]  # half a minute each
MIXTURES = 2 if USES_V2 else 8
Plain = Callable[[dict[str, str]], list[tuple[Mixture, list[Answer]]]]


def mixtures(limit: int) -> list[Mixture]:
    """Return mixtures, each with requests that end at this context limit, and two that hang up: in
    their prompt, and while they are answered."""
    long = [token for prompt in PROMPTS for token in prompt]
    to_the_end = greedy(limit, ignore_eos=True)
    more = [
        Crossed(long[7 : 6 + limit], to_the_end, "one before the limit", 1),
        Crossed(long[3 : limit - 3], to_the_end, "six before the limit", 2),
        Crossed(long[90 : 82 + limit], to_the_end, "hangs up in its prompt", 0, 1),
        Crossed(long[40:52], to_the_end, "hangs up while answered", 0, 5),
    ]
    mixes = map(mixture, range(MIXTURES))
    return [mix._replace(requests=[*more, *mix.requests]) for mix in mixes]


@pytest.fixture(scope="module")
def plain() -> Plain:
    """Mixtures and plain decoding's answers to each of their requests alone, by the settings that
    change them."""
    known: dict[tuple[str, ...], list[tuple[Mixture, list[Answer]]]] = {}

    def answers(combination: dict[str, str]) -> list[tuple[Mixture, list[Answer]]]:
        some = {name: combination[name] for name in ("cache dtype", "limit")}
        key = tuple(some.values())
        if key not in known:
            settings = engine_settings(some)
            with engine(**settings) as llm:
                known[key] = [
                    (mix, [answer_alone(llm, one) for one in mix.requests])
                    for mix in mixtures(settings["max_model_len"])
                ]
        return known[key]

    return answers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of drafters. Engines plan alike each time."""
    fix_costs(monkeypatch)
    # On CPUs with AMX, the kernel that vLLM picks for quantised layers does not support float32.
    monkeypatch.setattr(scaled_mm, "check_cpu_sgl_kernel", lambda *_: False)
    return tmp_path


@pytest.mark.parametrize("combination", COMBINATIONS, ids=described)
def test_every_two_settings(combination: dict[str, str], plain: Plain, folder: Path) -> None:
    """The text is plain decoding's, and the engine is in order afterwards."""
    expected, settings = plain(combination), engine_settings(combination)
    has_logprobs = combination.get("logprobs_mode", "raw") == "raw"
    has_priorities = combination.get("policy") == "priority"
    with ExitStack() as stack:
        if combination.get("draft_tree", "off") != "off":
            stack.enter_context(triton_attention())
        speculative = speculative_config(combination, folder)
        way = combination.get("scheduling", "synchronous")
        llm = stack.enter_context(engine(way, speculative_config=speculative, **settings))
        for number, (mix, answers) in enumerate(expected):
            found = serve(llm, mix, resets=True, has_priorities=has_priorities)
            wrong = wrong_answers(mix, found, answers, has_logprobs=has_logprobs)
            assert not wrong, f"mixture {number}: {wrong}"
        check_counters(llm, combination)
        check_order(llm)


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
