"""The engine's side: generate from each prompt, and have the worker write down what it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.parity.compare import Request
from vllm_dflash.parity.recorded import Recording

if TYPE_CHECKING:
    from vllm import LLM

Prompt = str | list[int]


@dataclass(frozen=True)
class EngineSide:
    """What an engine did with some prompts."""

    requests: list[Request]
    runner: str
    """Of vLLM: `v1` or `v2`."""
    nan_drafts: int


@dataclass(frozen=True)
class Written:
    """The same while the recordings are files, one a request; JSON-able."""

    token_ids: list[list[int]]
    prompt_lengths: list[int]
    runner: str
    nan_drafts: int

    def load(self, folder: Path) -> EngineSide:
        """Read the recordings from the folder they were written to."""
        requests = [
            Request(ids, length, Recording.load(recording_file(folder, number)))
            for number, (ids, length) in enumerate(
                zip(self.token_ids, self.prompt_lengths, strict=True)
            )
        ]
        return EngineSide(requests, self.runner, self.nan_drafts)


def recording_file(folder: Path, number: int) -> Path:
    """Where the recording of a prompt lies."""
    return folder / f"{number}.safetensors"


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


def record_prompts(
    llm: LLM,
    prompts: Sequence[Prompt],
    tokens: int,
    folder: Path,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Written:
    """Generate so many tokens from each prompt, text or token ids, one after the other.

    The recordings go to the folder, which is all that worker and caller need to share.

    Raises:
        ValueError: a prompt is longer than the engine's context.
    """
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    (before,) = llm.collective_rpc("dflash_stats")
    token_ids, prompt_lengths = [], []
    for number, prompt in enumerate(prompts):
        on_progress(f"Generating from prompt {number + 1} of {len(prompts)}")
        ids = llm.get_tokenizer().encode(prompt) if isinstance(prompt, str) else list(prompt)
        needed = len(ids) + tokens + before["block_size"]
        if not ids or needed > llm.model_config.max_model_len:
            raise ValueError(
                f"prompt {number + 1} has {len(ids)} tokens; with {tokens} new ones and a block it"
                f" needs {needed}, the engine takes {llm.model_config.max_model_len}: raise"
                " --max-model-len, lower --tokens or pass other prompts."
            )
        llm.collective_rpc("record_drafting")
        request: Any = {"prompt_token_ids": ids}
        (output,) = llm.generate([request], greedy, use_tqdm=False)
        llm.collective_rpc("take_recording", args=(str(recording_file(folder, number)),))
        token_ids.append(ids + list(output.outputs[0].token_ids))
        prompt_lengths.append(len(ids))
    (after,) = llm.collective_rpc("dflash_stats")
    nan_drafts = after["nan_drafts"] - before["nan_drafts"]
    return Written(token_ids, prompt_lengths, after["runner"], nan_drafts)
