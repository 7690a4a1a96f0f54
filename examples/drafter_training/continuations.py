"""Let the target write the text its drafter will learn from, with vLLM."""

from vllm import LLM, SamplingParams

Pair = tuple[list[int], list[int]]
"""Token ids of a prompt, and of what the target writes after it."""


def write_continuations(
    llm: LLM, prompts: list[list[int]], new_tokens: int, temperature: float = 0.0
) -> list[Pair]:
    """Continue every prompt, given as token ids, by at most `new_tokens` tokens."""
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        SamplingParams(temperature=temperature, max_tokens=new_tokens, detokenize=False),
    )
    return [(list(o.prompt_token_ids or []), list(o.outputs[0].token_ids)) for o in outputs]
