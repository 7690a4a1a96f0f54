"""Step 2 of 3: let the target write the text its drafter will learn from, with vLLM."""

from pathlib import Path

from vllm import LLM, SamplingParams

PROMPT_TOKENS = 96
NEW_TOKENS = 128


def write_continuations(target: Path, prompts: list[str]) -> list[tuple[list[int], list[int]]]:
    """Continue every prompt greedily. Returns (prompt ids, continuation ids) pairs."""
    llm = LLM(model=str(target), max_model_len=512, max_num_seqs=128, seed=0)
    tokenizer = llm.get_tokenizer()
    token_ids = [tokenizer(prompt)["input_ids"][:PROMPT_TOKENS] for prompt in prompts]
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in token_ids],
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, detokenize=False),
    )
    return [(list(o.prompt_token_ids or []), list(o.outputs[0].token_ids)) for o in outputs]
