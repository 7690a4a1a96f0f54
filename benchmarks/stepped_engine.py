"""vLLM's engine, stepped by hand, and the questions that an `EngineChild` answers with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from vllm_dflash.tools.server_process import Facts, facts_about

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


class Output(NamedTuple):
    """The output of one step for one request."""

    request_id: str
    token_ids: Sequence[int]
    """New tokens."""
    finished: bool
    logprobs: Any
    """vLLM's logprobs of these tokens, if the request asked for them."""


class SteppedEngine:
    """vLLM's engine, run one step at a time. Public methods with JSON values are questions."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine

    @classmethod
    def start(cls, **arguments: Any) -> Self:
        """Start an engine in this process. `arguments`: those of `vllm.LLM`."""
        from vllm import LLM

        return cls(LLM(**arguments).llm_engine)

    def facts(self) -> Facts:
        """Return facts about the engine."""
        return facts_about(self._engine)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Tokenize each text as a prompt."""
        tokenizer = self._engine.get_tokenizer()
        return [list(tokenizer.encode(text)) for text in texts]

    def dflash_stats(self) -> list[dict[str, Any]]:
        """Return each worker's counters since the engine started. Other engines crash on this."""
        return self._engine.collective_rpc("dflash_stats")

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.engine_core.shutdown(timeout=30.0)

    def add(
        self,
        request_id: str,
        tokens: Sequence[int],
        max_tokens: int,
        *,
        whole: bool = False,
        **sampling: Any,
    ) -> None:
        """Queue a request, greedy unless `sampling` says otherwise.

        A `whole` request has one output, when it is finished. `sampling`: more arguments of vLLM's
        `SamplingParams`.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA
        settings: dict[str, Any] = {"temperature": 0.0, "detokenize": False, **sampling}
        params = SamplingParams(max_tokens=max_tokens, output_kind=kind, **settings)
        self._engine.add_request(request_id, {"prompt_token_ids": list(tokens)}, params)

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

    def complete(
        self, requests: Sequence[Sequence[Any]], concurrency: int
    ) -> list[tuple[list[int], float | None]]:
        """Run requests to their end, so many at a time.

        Each is tokens, most new tokens, and a token whose regret as the next one to report, or
        None. Returns the new tokens and the regret of each, in nat.
        """
        waiting, running = list(enumerate(requests))[::-1], dict[str, int | None]()
        finished: dict[int, tuple[list[int], float | None]] = {}
        while waiting or running:
            while waiting and len(running) < concurrency:
                number, (tokens, most, scored) = waiting.pop()
                running[str(number)] = scored
                more = {} if scored is None else {"logprob_token_ids": [scored]}
                self.add(str(number), tokens, most, whole=True, **more)
            for output in self.step():
                token, regret = running.pop(output.request_id), None
                if token is not None:  # vLLM always lists the most likely token, too
                    first = output.logprobs[0]
                    regret = max(one.logprob for one in first.values()) - first[token].logprob
                finished[int(output.request_id)] = list(output.token_ids), regret
        return [finished[number] for number in range(len(requests))]
