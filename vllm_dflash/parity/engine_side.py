"""The engine's side: generate from each prompt, and have the worker write down what it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.parity.compare import Request
from vllm_dflash.parity.recorded import Recording

if TYPE_CHECKING:
    from vllm import LLM


SECONDS_TO_LEAVE = 30.0
"""vLLM's own limit is 5; what it kills then leaves shared memory behind."""


@dataclass(frozen=True)
class EngineSide:
    """What an engine did with some prompts."""

    requests: list[Request]
    runner: str
    nan_drafts: int


def engine_arguments(drafter: str, target: str, dtype: str, max_model_len: int) -> dict[str, Any]:
    """Arguments of an engine that can be recorded: eager, one request at a time, nothing cached."""
    return {
        "model": target,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "enforce_eager": True,  # hooks see nothing of compiled code
        "max_num_seqs": 1,
        "enable_prefix_caching": False,  # cached rows would never be recorded
        "async_scheduling": False,  # the worker must see each verdict before it drafts again
        "seed": 0,
        "speculative_config": {"method": "dflash", "model": drafter, "draft_length": "fixed"},
    }


@contextmanager
def running(arguments: dict[str, Any]) -> Iterator[LLM]:
    """An engine, whose processes are gone afterwards."""
    from vllm import LLM

    llm = LLM(**arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown(timeout=SECONDS_TO_LEAVE)


def record_prompts(
    llm: LLM,
    prompts: Sequence[str | list[int]],
    tokens: int,
    folder: Path,
    on_progress: Callable[[str], None] = lambda _: None,
) -> EngineSide:
    """Generate so many tokens from each prompt, text or token ids, one after the other.

    The recordings lie in the folder, which is all that worker and caller need to share.
    """
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    requests = []
    (before,) = llm.collective_rpc("dflash_stats")
    for number, prompt in enumerate(prompts):
        on_progress(f"Generating from prompt {number + 1} of {len(prompts)}")
        path = folder / f"{number}.safetensors"
        llm.collective_rpc("record_drafting")
        request: Any = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        (output,) = llm.generate([request], greedy, use_tqdm=False)
        llm.collective_rpc("take_recording", args=(str(path),))
        prompt_ids = list(output.prompt_token_ids or [])
        token_ids = prompt_ids + list(output.outputs[0].token_ids)
        requests.append(Request(token_ids, len(prompt_ids), Recording.load(path)))
    (after,) = llm.collective_rpc("dflash_stats")
    nan_drafts = after["nan_drafts"] - before["nan_drafts"]
    return EngineSide(requests, after["runner"], nan_drafts)
