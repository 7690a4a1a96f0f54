"""The process of the demo's servers: `vllm serve` whose streams have one message for each step.

vLLM joins messages of steps that its event loop falls behind of. Then it could not be told which
tokens came in one step.
"""

from __future__ import annotations

from collections import deque

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import async_llm
from vllm.v1.engine.output_processor import RequestOutputCollector

from vllm_dflash.tools import server_process


class StepCollector(RequestOutputCollector):
    """Hands over the outputs of a request one by one."""

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        super().__init__(output_kind, request_id)
        self._later: deque[RequestOutput] = deque()

    def put(self, output: RequestOutput | Exception) -> None:
        """Hand over an output, after those that still wait; an exception at once."""
        if self.output is None or isinstance(output, Exception):
            super().put(output)
        else:
            self._later.append(output)

    async def get(self) -> RequestOutput:
        """Wait for the next output."""
        output = await super().get()
        self._put_next()
        return output

    def get_nowait(self) -> RequestOutput | None:
        """Return the next output; None if there is none yet."""
        output = super().get_nowait()
        self._put_next()
        return output

    def _put_next(self) -> None:
        if self._later:
            super().put(self._later.popleft())


if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    async_llm.RequestOutputCollector = StepCollector
    server_process.run(main)
