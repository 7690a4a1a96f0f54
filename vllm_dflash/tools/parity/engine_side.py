"""The engine's side: generate from each prompt, and have the worker write down what it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.tools.engine_process import SECONDS_TO_CLOSE
from vllm_dflash.tools.parity.recompute import Request
from vllm_dflash.tools.parity.recording import Recording

if TYPE_CHECKING:
    from vllm import LLM

START = f"{__name__}:start"
Prompt = str | list[int]
Ask = Callable[..., Any]
"""Puts a question, by the name of a method of `Answers` and with its arguments."""


@dataclass(frozen=True)
class EngineSide:
    """What an engine did with some prompts."""

    requests: list[Request]
    runner: str
    """Of vLLM: `v1` or `v2`."""
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


def record_prompts(
    ask: Ask,
    prompts: Sequence[Prompt],
    tokens: int,
    folder: Path,
    on_progress: Callable[[str], None] = lambda _: None,
) -> EngineSide:
    """Generate so many tokens from each prompt, text or token ids, one after the other.

    The recordings go through the folder, which is all that the engine and the caller share.

    Raises:
        ValueError: a prompt is longer than the engine's context. Nothing is generated then.
    """
    on_progress("Starting the engine")
    before = ask("facts")
    token_ids = [ask("encode", text=one) if isinstance(one, str) else one for one in prompts]
    for number, ids in enumerate(token_ids):
        needed = len(ids) + tokens + before["block_size"]
        if not ids or needed > before["max_model_len"]:
            raise ValueError(
                f"prompt {number + 1} has {len(ids)} tokens; with {tokens} new ones and a block it"
                f" needs {needed}, the engine takes {before['max_model_len']}: raise"
                " --max-model-len, lower --tokens or pass other prompts."
            )
    requests = []
    for number, ids in enumerate(token_ids):
        on_progress(f"Generating from prompt {number + 1} of {len(prompts)}")
        file = folder / f"{number}.safetensors"
        written = ask("record", token_ids=ids, tokens=tokens, file=str(file))
        requests.append(Request([*ids, *written], len(ids), Recording.load(file)))
    nan_drafts = ask("facts")["nan_drafts"] - before["nan_drafts"]
    return EngineSide(requests, before["runner"], nan_drafts)


def start(**engine_arguments: Any) -> Answers:
    """An engine in this process."""
    from vllm import LLM

    return Answers(LLM(**engine_arguments))


class Answers:
    """What can be asked of an engine, with values that JSON can hold."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def facts(self) -> dict[str, Any]:
        """About the engine: max_model_len, and the worker's counters since it started."""
        (stats,) = self._llm.collective_rpc("dflash_stats")
        counters = {name: stats[name] for name in ("block_size", "runner", "nan_drafts")}
        return counters | {"max_model_len": self._llm.model_config.max_model_len}

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, as a prompt."""
        return list(self._llm.get_tokenizer().encode(text))

    def record(self, token_ids: list[int], tokens: int, file: str) -> list[int]:
        """The tokens that follow these, greedily; what was computed meanwhile goes to the file."""
        from vllm import SamplingParams

        greedy = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        self._llm.collective_rpc("record_drafting")
        request: Any = {"prompt_token_ids": token_ids}
        (output,) = self._llm.generate([request], greedy, use_tqdm=False)
        self._llm.collective_rpc("take_recording", args=(file,))
        return list(output.outputs[0].token_ids)

    def close(self) -> None:
        """End the engine's processes."""
        self._llm.llm_engine.engine_core.shutdown(timeout=SECONDS_TO_CLOSE)
