"""Runs vLLM's engine step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

Prompt = str | Sequence[int]


class Output(NamedTuple):
    """The output of one step for one request."""

    request_id: str
    token_ids: Sequence[int]
    """New tokens."""
    finished: bool
    logprobs: Any = None
    """vLLM's logprobs of these tokens, if the request asked for them."""


class SteppedEngine:
    """vLLM's engine, run one step at a time.

    It is also the clock of measurements, so that a fake engine can have a fake clock.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        max_tokens: int,
        *,
        whole: bool = False,
        **sampling: Any,
    ) -> None:
        """Queue a request, greedy unless `sampling` says otherwise.

        Output is detokenized only for text prompts. A `whole` request has one output, when it is
        finished. `sampling`: more arguments of vLLM's `SamplingParams`.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        is_text = isinstance(prompt, str)
        settings: dict[str, Any] = {"temperature": 0.0, "detokenize": is_text, **sampling}
        kind = RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA
        params = SamplingParams(max_tokens=max_tokens, output_kind=kind, **settings)
        tokens_or_text: Any = prompt if is_text else {"prompt_token_ids": list(prompt)}
        self._engine.add_request(request_id, tokens_or_text, params)

    def step(self) -> list[Output]:
        """Run one step and return its outputs. Call it only while a request is in flight."""
        found: list[Output] = []
        for output in self._engine.step():
            one = output.outputs[0]
            found.append(Output(output.request_id, one.token_ids, output.finished, one.logprobs))
        return found

    def abort(self, request_ids: list[str]) -> None:
        """Abort these requests; they have no further outputs."""
        self._engine.abort_request(request_ids)

    def now(self) -> float:
        """Return seconds since an arbitrary moment."""
        return time.perf_counter()
