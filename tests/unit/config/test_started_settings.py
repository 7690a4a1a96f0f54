"""What an engine's other settings do to its drafts, and what is said of it at its start."""

from __future__ import annotations

import re
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.usage.usage_lib import UsageContext

from support.log_lines import log_lines
from support.pairs import Pair

Settings = dict[str, Any]
LORA: Settings = {"enable_lora": True}
ONE_MODULE: Settings = {**LORA, "lora_target_modules": ["q_proj"]}
RUNNER, TRITON = "vllm.envs.VLLM_USE_V2_MODEL_RUNNER", "vllm.triton_utils.HAS_TRITON"
ON_V1, ON_V2 = {RUNNER: False}, {RUNNER: True, TRITON: True, "vllm.config.vllm.HAS_TRITON": True}
RUST = "vllm.envs.VLLM_USE_RUST_FRONTEND"
MIN_P = "set min_p to 0.05.*--override-generation-config '{\"min_p\": 0}'"


@pytest.mark.parametrize(
    ("surroundings", "asked", "said", "times"),
    [
        # Every request would be refused with HTTP 400.
        ({}, {"override_generation_config": {"min_p": 0.05}}, MIN_P, 1),
        ({}, {"override_generation_config": {"min_p": 0.0}}, "HTTP 400", 0),
        ({}, {"override_generation_config": {}}, "HTTP 400", 0),
        # Adapters of the head change texts on V2.
        (ON_V2, LORA, "train lm_head", 1),
        (ON_V2, ONE_MODULE, "train lm_head", 0),
        (ON_V2, {}, "train lm_head", 0),
        (ON_V1, LORA, "train lm_head", 0),
        # The front end in Rust lacks something.
        ({RUST: True}, {}, "VLLM_USE_RUST_FRONTEND", 1),
        ({RUST: False}, {}, "VLLM_USE_RUST_FRONTEND", 0),
        # Triton on a CPU selects a runner that is not measured there.
        ({RUNNER: None, TRITON: True}, {}, "VLLM_USE_V2_MODEL_RUNNER=0 selects it", 1),
        ({RUNNER: None, TRITON: False}, {}, "VLLM_USE_V2_MODEL_RUNNER=0 selects it", 0),
    ],
)
def test_what_is_said(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    surroundings: Settings,
    asked: Settings,
    said: str,
    times: int,
) -> None:
    for name, value in surroundings.items():
        monkeypatch.setattr(name, value)
    with log_lines() as lines:
        pair.start(**asked)
    assert sum(re.search(said, line) is not None for line in lines) == times


@pytest.mark.parametrize(
    ("sizes", "longest"),
    [
        ((2048, 128), 7),
        ((2048, 500), 3),
        ((256, 128), 1),
        ((128, 128), 0),
        ((None, None), 7),  # 4,096 rows for 256 requests
        ((None, 512), 7),
        ((None, 600), 5),
    ],
)
def test_drafts_beside_lora_have_the_rows_that_vllm_wants(
    pair: Pair, sizes: tuple[int | None, int | None], longest: int
) -> None:
    """vLLM refuses longer ones, and does not say what would help."""
    rows, most = sizes
    asked: dict[str, Any] = {"max_num_batched_tokens": rows, "max_num_seqs": most}
    asked["enable_lora"] = True
    if not longest:
        with pytest.raises(ValueError, match="--max-num-batched-tokens 1024 or --max-num-seqs 16 "):
            pair.start(**asked)
        return
    with log_lines() as lines:
        assert pair.start(**asked).speculative_config.num_speculative_tokens == longest
    said = [line for line in lines if "with LoRA" in line]
    assert len(said) == (longest < 7)
    assert not said or f"drafts have up to {longest} tokens, not 7: with LoRA" in said[0]
    if said:
        found = re.search(r"--max-num-batched-tokens (\d+) or --max-num-seqs (\d+) has", said[0])
        assert found is not None
        for name, value in zip(
            ("max_num_batched_tokens", "max_num_seqs"), found.groups(), strict=True
        ):
            remedied = pair.start(**asked | {name: int(value)})
            assert remedied.speculative_config.num_speculative_tokens == 7


@pytest.mark.parametrize("is_server", [True, False])
def test_a_server_of_vllms_default_size_has_lora(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, is_server: bool
) -> None:
    """On an H100, vLLM lets servers have 8 rows for each request, and `LLM` 16."""
    size = {UsageContext.OPENAI_API_SERVER: 4096, UsageContext.LLM_CLASS: 8192}
    monkeypatch.setattr(
        EngineArgs,
        "get_batch_defaults",
        lambda *_: (size, dict.fromkeys(size, 1024)),
    )
    kind = AsyncEngineArgs if is_server else EngineArgs
    args = kind(
        model=str(pair.target),
        skip_tokenizer_init=True,
        enable_lora=True,
        max_model_len=256,
        speculative_config={"method": "dflash", "model": str(pair.drafter)},
    )
    usage = UsageContext.OPENAI_API_SERVER if is_server else UsageContext.LLM_CLASS
    config = args.create_engine_config(usage_context=usage)
    assert config.speculative_config.num_speculative_tokens == (3 if is_server else 7)


@pytest.mark.parametrize("rows", [None, 256, 260, 5000])
@pytest.mark.parametrize("is_chunked", [True, False])
def test_without_chunked_prefill_the_longest_prompt_fits_beside_the_rows_for_drafts(
    pair: Pair, rows: int | None, is_chunked: bool
) -> None:
    sizes: dict[str, Any] = {"max_num_batched_tokens": rows, "max_num_seqs": 1}
    config = pair.start(enable_chunked_prefill=is_chunked, **sizes)
    longest = config.speculative_config.num_speculative_tokens
    found = config.scheduler_config.max_num_batched_tokens
    assert longest > 7
    assert found == ((rows or 256) if is_chunked else max(rows or 0, 256 + longest))
