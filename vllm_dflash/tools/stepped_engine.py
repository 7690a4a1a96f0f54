"""vLLM's engine, stepped by hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

Prompt = str | Sequence[int]


class Output(NamedTuple):
    """What one step made of one request."""

    request_id: str
    token_ids: Sequence[int]
    """Those that are new."""
    finished: bool
    logprobs: Any = None
    """vLLM's, of these tokens, where the request asked for them."""


class SteppedEngine:
    """vLLM's engine, stepped by hand: requests go in, steps are taken one at a time.

    It is also the clock of what is measured on it: a made-up engine has a made-up one.
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
        """Queue a request, greedy unless `sampling` tells otherwise.

        No text is made of what follows token ids. A `whole` one is heard of once, when it is
        finished. `sampling` are more arguments of vLLM's `SamplingParams`.
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
        """Wait for the next outputs. Only while a request is in flight."""
        found: list[Output] = []
        for output in self._engine.step():
            one = output.outputs[0]
            found.append(Output(output.request_id, one.token_ids, output.finished, one.logprobs))
        return found

    def abort(self, request_ids: list[str]) -> None:
        """Forget these requests; nothing more is heard of them."""
        self._engine.abort_request(request_ids)

    def now(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def wait_until(self, moment: float) -> None:
        """Do nothing until it is `now`."""
        time.sleep(max(moment - self.now(), 0.0))
