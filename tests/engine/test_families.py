"""Every target family: the engine's drafts are the reference's, and the output is the target's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM
from vllm.model_executor.kernels.linear.scaled_mm import cpu as scaled_mm

from support.drafter_watch import watch_logits
from support.engines import (
    FIXED,
    TARGET,
    USES_V2,
    engine,
    greedy,
    held_out_prompts,
    slow_on_v2,
    token_ids,
)
from support.families import NEW_TOKENS, PROMPTS, Family, make_family
from support.quantised import quantise
from support.reference_decoding import draft
from support.stepped_requests import tokens_by_step
from support.targets import BUILDERS
from vllm_dflash.model.vocabulary import DraftVocabulary

pytestmark = pytest.mark.usefixtures("runner")
SHAPE_SCALE = 64**0.5  # of these targets


ALIKE = ("llama-tied", "qwen2", "qwen3-tied", "qwen3-moe")
"""To either runner, as "llama" is."""
FAMILIES = [name for name in BUILDERS if not (USES_V2 and name in ALIKE)]


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.slow if name in ALIKE else slow_on_v2)
        for name in FAMILIES
    ]
)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Family:
    return make_family(tmp_path, request.param)


def drafted_logits(llm: LLM, prompt: list[int]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Return the tokens of each step, and the drafter's logits at each step that drafted."""
    params = greedy(NEW_TOKENS, detokenize=False, ignore_eos=True)
    with watch_logits(llm) as logits:
        (steps,) = tokens_by_step(llm, [prompt], params)
    return steps, logits


def largest_error(family: Family, llm: LLM, prompt: list[int]) -> float:
    """Return the largest error of the engine's logits against the reference's, over all steps,
    relative to the largest logit."""
    steps, logits = drafted_logits(llm, prompt)
    ids, features = family.written[tuple(prompt)]
    assert ids[0, len(prompt) :].tolist() == [token for step in steps for token in step]
    context, worst = len(prompt), 0.0
    assert len(logits) >= 2
    for got, tokens in zip(logits, [[], *steps[1:]], strict=False):
        context += len(tokens)
        bonus = int(ids[0, context])
        # A block's rows see each other, so the reference drafts as many as the engine did.
        expected = draft(family.target, family.drafter, features[:context], bonus, len(got))
        error = (got - expected).abs().max() / expected.abs().max()
        worst = max(worst, float(error))
    return worst


def test_parity_and_output(family: Family) -> None:
    """Logits differ by less than 1e-4 (relative, float32), with prompts of several windows.

    The output, of two requests at once as well, is what the target writes without any drafts in
    Hugging Face's own float32.
    """
    params = greedy(NEW_TOKENS, detokenize=False, ignore_eos=True)
    requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    expected = [family.written[tuple(prompt)][0][0, len(prompt) :].tolist() for prompt in PROMPTS]
    with family.drafting() as llm:
        assert token_ids(llm, requests, params) == expected
        assert max(largest_error(family, llm, prompt) for prompt in PROMPTS) < 1e-4
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["nan_drafts"] == 0
    assert stats["drafted_steps"] > 0


@pytest.mark.parametrize("times", [0, pytest.param(2, marks=slow_on_v2)])
def test_hazard_7_a_wrong_embedding_scale_breaks_parity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Gemma scales embeddings by sqrt(hidden); once is right, never and twice are not."""
    family = make_family(tmp_path, "gemma4")
    share = DraftVocabulary.share
    scale = SHAPE_SCALE ** (times - 1)

    def share_wrongly(self: DraftVocabulary, target: Any) -> None:
        share(self, target)
        right: Any = self._embed
        self._embed = lambda token_ids: right(token_ids) * scale

    monkeypatch.setattr(DraftVocabulary, "share", share_wrongly)
    with family.drafting() as llm:
        assert largest_error(family, llm, PROMPTS[0]) > 0.01


@slow_on_v2
def test_a_quantised_target(runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo pair with an 8-bit target: its own output, and drafts as good as before."""
    # On CPUs with AMX, the kernel that vLLM picks for such layers does not support float32.
    monkeypatch.setattr(scaled_mm, "check_cpu_sgl_kernel", lambda *_: False)
    quantise(TARGET, tmp_path / "target")
    prompts, params = held_out_prompts(8), greedy(24)
    with engine(model=str(tmp_path / "target")) as llm:
        expected = token_ids(llm, prompts, params)
    with engine(model=str(tmp_path / "target"), speculative_config=dict(FIXED)) as llm:
        assert token_ids(llm, prompts, params) == expected
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["mean_acceptance_length"] > 2.0
