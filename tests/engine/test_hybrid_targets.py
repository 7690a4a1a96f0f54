"""Targets with linear and full attention: rejected drafts leave no state behind.

On Model Runner V2 with the kernels for GPUs, in float32, against Hugging Face.
test_hybrid_targets_cpu.py tests those for CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from support.device_decisions import directed, lengths_in_turn
from support.engines import DFLASH, FIXED, engine, greedy, prefix_cache_hits, token_ids
from support.forced_drafts import forced_drafts
from support.hybrids import kernels_for_gpus, know_qwen35
from support.pairs import drafter_config, save_drafter
from support.stepped_requests import Stepped
from support.targets import continued, make_target

pytestmark = pytest.mark.v2
NEW_TOKENS = 16
PROMPTS = [
    [(7 * row + 3 * i) % 300 for i in range(length)] for row, length in enumerate((9, 110, 230))
]
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 3}
SETTINGS |= {"max_num_batched_tokens": 128, "enable_prefix_caching": True}  # several chunks


DRAFTERS: dict[str, dict[str, Any]] = {
    "qwen3-next": {},
    # Layers of the target's shape: vLLM mixes them with the target's in two groups of the cache.
    "qwen3.5": {"head_dim": 64, "num_key_value_heads": 1},
}
one_of_them = pytest.mark.parametrize("hybrid", ["qwen3-next"], indirect=True)


@dataclass
class Hybrid:
    """A target, the texts it writes, and the prompt tokens that plain vLLM finds in its cache."""

    folder: Path
    texts: list[list[int]]
    """Prompts, each with what the target writes after it."""
    plain_hits: int = 0

    @property
    def expected(self) -> list[list[int]]:
        return [text[len(prompt) :] for text, prompt in zip(self.texts, PROMPTS, strict=True)]

    def engine(self, scheduling: str = "", speculative: dict[str, Any] | None = None) -> Any:
        settings: dict[str, Any] = {"model": str(self.folder / "target"), **SETTINGS}
        if speculative is not None:
            drafter = str(self.folder / "drafter")
            settings["speculative_config"] = {**speculative, "model": drafter}
        return engine(scheduling, **settings)


def params() -> SamplingParams:
    return greedy(NEW_TOKENS, detokenize=False, ignore_eos=True)


def serve(llm: LLM) -> list[list[int]]:
    return token_ids(llm, [{"prompt_token_ids": prompt} for prompt in PROMPTS], params())


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    know_qwen35()
    with kernels_for_gpus():
        yield


# The second takes a minute more; V1 tests both.
@pytest.fixture(
    scope="module", params=["qwen3-next", pytest.param("qwen3.5", marks=pytest.mark.slow)]
)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    folder = tmp_path_factory.mktemp("hybrid")
    target = make_target(folder / "target", request.param)
    # One of its layers has a window: their caches are not a group of their own.
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
    save_drafter(folder / "drafter", drafter_config(**windows, **DRAFTERS[request.param]))
    found = Hybrid(folder, [continued(target, prompt, NEW_TOKENS) for prompt in PROMPTS])
    with found.engine() as llm:
        assert serve(llm) == found.expected
        assert serve(llm) == found.expected
        found.plain_hits = prefix_cache_hits(llm)
    assert found.plain_hits > 0
    return found


@pytest.fixture(scope="module")
def shared(hybrid: Hybrid) -> Iterator[LLM]:
    with hybrid.engine(speculative=FIXED) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    assert shared.reset_prefix_cache()
    yield shared
    (stats,) = shared.collective_rpc("dflash_stats")
    assert stats["nan_drafts"] == 0


def test_any_number_of_drafts_may_be_rejected(llm: LLM, hybrid: Hybrid) -> None:
    """The state is the one after the last accepted draft. Prompts come in chunks, and then from the
    cache, where as much is found as without drafts."""
    before = prefix_cache_hits(llm)
    (stats_before,) = llm.collective_rpc("dflash_stats")
    with forced_drafts(llm, hybrid.texts, lambda place: place % 8):
        assert serve(llm) == hybrid.expected
        assert prefix_cache_hits(llm) == before
        assert serve(llm) == hybrid.expected
    assert prefix_cache_hits(llm) - before == hybrid.plain_hits
    (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["accepted_tokens"] - stats_before["accepted_tokens"] > NEW_TOKENS


@one_of_them
def test_requests_thrown_out_between_two_steps_go_on(llm: LLM, hybrid: Hybrid) -> None:
    """`reset_prefix_cache` preempts them while they have drafts, and they resume at once."""
    stepped, names = Stepped(llm), ("0", "1", "2")
    with forced_drafts(llm, hybrid.texts, lambda place: place % 8):
        for name in names:
            stepped.add(name, PROMPTS[int(name)], params())
        stepped.until(1, *names)
        assert stepped.core.reset_prefix_cache(reset_running_requests=True)
        stepped.finish()
    assert [stepped.tokens(name) for name in names] == hybrid.expected


@one_of_them
def test_a_state_is_not_the_next_requests(llm: LLM, hybrid: Hybrid) -> None:
    """One leaves while it has drafts, one in the middle of its prompt; others take their places."""
    stepped = Stepped(llm)
    with forced_drafts(llm, hybrid.texts, lambda place: place % 8):
        for name, prompt in (("decoding", PROMPTS[0]), ("1", PROMPTS[1]), ("long", PROMPTS[2])):
            stepped.add(name, prompt, params())
        stepped.until(1, "decoding", "1")
        assert not stepped.steps["long"]
        stepped.core.abort_request(["decoding", "long"])
        for number in (0, 2):
            stepped.add(str(number), PROMPTS[number], params())
        stepped.finish()
    assert [stepped.tokens(name) for name in ("0", "1", "2")] == hybrid.expected


@one_of_them
def test_steps_of_other_lengths_scheduled_asynchronously(
    hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None, some or all of K drafts, chosen while the previous step runs."""
    with hybrid.engine("asynchronous", DFLASH) as llm:
        directed(llm, monkeypatch, lengths_in_turn(7, 0, 0, 3, 1, 0, 7, 2))
        with forced_drafts(llm, hybrid.texts, lambda place: place % 8):
            for _ in range(2):
                assert serve(llm) == hybrid.expected
        assert prefix_cache_hits(llm) == hybrid.plain_hits
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["accepted_tokens"] > 0
    assert stats["skipped_steps"] > 0
