"""vLLM as the loads see an engine."""

from __future__ import annotations

import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from vllm_dflash.tools.bench.loads.load_engine import Output


class VllmEngine:
    """Greedy requests of fixed lengths, stepped by hand, so that concurrency is exact."""

    def __init__(self, llm: LLM) -> None:
        self._engine: Any = llm.llm_engine

    def add(self, request_id: str, prompt: str, max_tokens: int) -> None:
        """Queue a request that will get exactly this many tokens."""
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,  # outputs do not repeat what came before
        )
        self._engine.add_request(request_id, prompt, sampling)

    def step(self) -> list[Output]:
        """Wait for the next outputs."""
        return [
            Output(output.request_id, len(output.outputs[0].token_ids), output.finished)
            for output in self._engine.step()
        ]

    def abort(self, request_ids: list[str]) -> None:
        """Forget these requests."""
        self._engine.abort_request(request_ids)

    def now(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)
