"""The whole engine on the demo pair: float32, greedy, against plain vLLM and the reference."""

import pytest
import torch
from engines import (
    DFLASH,
    DRAFTER,
    TARGET,
    acceptance_by_request,
    engine,
    greedy,
    held_out_prompts,
    token_ids,
)
from transformers import Qwen3ForCausalLM

from vllm_dflash.checkpoint.read import read_drafter
from vllm_dflash.reference import ReferenceDrafter, generate

pytestmark = pytest.mark.engine
NEW_TOKENS = 48
PROMPTS = held_out_prompts(24)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with engine() as llm:
        return token_ids(llm, PROMPTS, greedy(NEW_TOKENS))


@pytest.mark.parametrize(
    ("concurrency", "batched_tokens"), [(1, 64), (8, 32), (32, 64)], ids=lambda n: str(n)
)
def test_output_is_identical_to_plain_decoding(
    plain: list[list[int]], concurrency: int, batched_tokens: int
) -> None:
    """Chunked prefill forced small, prefix caching on, every prompt twice."""
    with engine(
        speculative_config=dict(DFLASH),
        max_num_seqs=concurrency,
        max_num_batched_tokens=batched_tokens,
        enable_prefix_caching=True,
    ) as llm:
        assert token_ids(llm, PROMPTS, greedy(NEW_TOKENS)) == plain
        assert token_ids(llm, PROMPTS, greedy(NEW_TOKENS)) == plain
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["proposer"] == "vllm_dflash.runner.v1.DFlashProposer"
    assert stats["runner"] == "v1"
    assert stats["block_size"] == 8
    assert stats["nan_drafts"] == 0
    assert stats["mean_acceptance_length"] > 2.5
    assert 0 < stats["accepted_tokens"] < stats["draft_tokens"]
    assert stats["drafted_steps"] <= stats["steps"]


def test_acceptance_of_every_step_equals_the_reference() -> None:
    """Eight requests at once and in chunks: each step accepts what the reference accepts."""
    target = Qwen3ForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    spec = read_drafter(str(DRAFTER))
    drafter = ReferenceDrafter.load(spec, DRAFTER).float()
    prompts = PROMPTS[:8]
    with engine(speculative_config=dict(DFLASH), max_num_seqs=8, max_num_batched_tokens=96) as llm:
        lengths = acceptance_by_request(llm)
        outputs = llm.generate(prompts, greedy(NEW_TOKENS), use_tqdm=False)
        stop_ids = {llm.get_tokenizer().eos_token_id}
        observed = [
            lengths[req_id] for req_id in sorted(lengths, key=lambda name: int(name.split("-")[0]))
        ]
    expected = [
        generate(target, drafter, list(output.prompt_token_ids), NEW_TOKENS, stop_ids=stop_ids)
        for output in outputs
    ]
    assert [list(o.outputs[0].token_ids) for o in outputs] == [e.tokens for e in expected]
    assert observed == [e.acceptance_lengths for e in expected]
