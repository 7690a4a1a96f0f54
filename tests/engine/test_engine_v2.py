"""Features of Model Runner V2 only: asynchronous scheduling, vLLM's speculator beside ours."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import DEMO, importing_support
from support.device_decisions import directed, lengths_in_turn, prefer
from support.engines import (
    DFLASH,
    DRAFTER,
    FIXED,
    TARGET,
    engine,
    greedy,
    held_out_prompts,
    proposer_of,
    scheduler_of,
    token_ids,
)
from support.native_child import NEW_TOKENS
from support.stepped_requests import tokens_by_step
from vllm_dflash.engine.v2.v2_scheduler import V2AsyncScheduler

pytestmark = pytest.mark.v2
PROMPTS = held_out_prompts(8)[4:]
PARAMS = greedy(32)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Texts that plain vLLM writes."""
    with engine() as llm:
        return token_ids(llm, PROMPTS, PARAMS)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(DRAFTER, id="dflash"),
        pytest.param(DEMO / "drafter2", id="dflash2", marks=pytest.mark.slow),
        pytest.param(DEMO / "lilicorr", id="lilicorr", marks=pytest.mark.slow),
    ],
)
def test_the_same_acceptance_as_vllms_own_speculator(tmp_path: Path, source: Path) -> None:
    """The drafter's layers share a key norm: vLLM's CPU kernel uses only the first layer's."""
    drafter = tmp_path / "drafter"
    shutil.copytree(source, drafter)
    tensors = load_file(drafter / "model.safetensors")
    for name in tensors:
        if name.endswith("k_norm.weight"):
            tensors[name] = tensors["layers.0.self_attn.k_norm.weight"].clone()
    save_file(tensors, drafter / "model.safetensors", metadata={"format": "pt"})
    child = subprocess.run(
        [
            sys.executable,
            "-m",
            "support.native_child",
            str(TARGET),
            str(drafter),
            json.dumps(PROMPTS),
        ],
        env={**os.environ, **importing_support(), "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    native = json.loads(child.stdout.splitlines()[-1])
    speculative = {**FIXED, "model": str(drafter)}
    with engine(speculative_config=speculative, max_num_seqs=8) as llm:
        ours = tokens_by_step(llm, PROMPTS, greedy(NEW_TOKENS, ignore_eos=True))
    assert ours == native
    assert max(len(step) for steps in ours for step in steps) > 4


def test_asynchronous_steps_without_drafts_store_context_and_draft_nothing(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lengths the scheduler chooses, from none to all, the output stays the same."""
    with engine("asynchronous", speculative_config=dict(DFLASH), max_num_seqs=4) as llm:
        assert type(scheduler_of(llm)) is V2AsyncScheduler
        directed(llm, monkeypatch, lengths_in_turn(7, 0, 0, 3, 1, 0, 7, 7, 2, 0))
        prefer(llm, text=0.0, block=0.9)
        drafted = []
        block = proposer_of(llm).model.block
        forward = block.forward

        def counted(*args: torch.Tensor) -> torch.Tensor:
            drafted.append(len(args[0]))
            return forward(*args)

        monkeypatch.setattr(block, "forward", counted)
        assert token_ids(llm, PROMPTS, PARAMS) == expected
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["skipped_steps"] > 0
    assert len(drafted) == stats["drafted_steps"]
    assert stats["mean_acceptance_length"] > 1.8
