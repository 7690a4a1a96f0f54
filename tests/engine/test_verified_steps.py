"""Steps of a real engine that verify K drafts without a drafter, for `bench --break-even`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from support.engines import TARGET, held_out_prompts
from vllm_dflash.tools.bench.break_even import verifying_side
from vllm_dflash.tools.bench.step_answers import START, StepAnswers

pytestmark = pytest.mark.engine
K = 15
PROMPTS = held_out_prompts(8)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StepAnswers]:
    side, logs = verifying_side(K), tmp_path_factory.mktemp("logs")
    arguments: dict[str, Any] = {"model": str(TARGET), "dtype": "float32", "enforce_eager": True}
    arguments |= {"max_model_len": 400, "disable_log_stats": False, "block_size": 32}
    arguments["kv_cache_memory_bytes"] = 4 << 20  # 672 tokens
    with side.start(logs, start=START, **arguments) as process:
        yield cast("StepAnswers", process.answers)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_each_request_verifies_all_drafts_in_each_step(
    engine: StepAnswers, concurrency: int
) -> None:
    """Also in a second window, whose prompts are in the prefix cache."""
    for context in (64, 100, 100):
        load: dict[str, Any] = {
            "context": context,
            "concurrency": concurrency,
            "tokens": 12,
            "seconds": 60.0,
        }
        before = engine.counts()
        result = engine.steps(prompts=PROMPTS, **load)
        assert result["steps"] == 12
        assert result["step_seconds"] > 0
        after = engine.counts()
        assert after["accepted_tokens"] == 0
        drafts = after["draft_tokens"] - before["draft_tokens"]
        assert drafts >= K * 12 * concurrency


def test_a_window_ends_after_its_time(engine: StepAnswers) -> None:
    result = engine.steps(prompts=PROMPTS, context=64, concurrency=1, tokens=99, seconds=1e-6)
    assert result["steps"] == 1


def test_steps_that_verify_fewer_drafts_are_refused(engine: StepAnswers) -> None:
    """A request near the maximum length has no room for K drafts."""
    with pytest.raises(ValueError, match=r"verified \d+ drafts of 180 .*raise --max-model-len"):
        engine.steps(prompts=PROMPTS, context=380, concurrency=1, tokens=12, seconds=60.0)


def test_what_does_not_fit_is_refused(engine: StepAnswers) -> None:
    """Requests that wait for the cache would make a step look fast."""
    with pytest.raises(ValueError, match=r"does not hold all requests.*VLLM_CPU_KVCACHE_SPACE"):
        engine.steps(prompts=PROMPTS, context=300, concurrency=12, tokens=12, seconds=60.0)
