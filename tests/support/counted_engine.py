"""An engine that is only counters and a clock, for tests of loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_dflash.tools.stepped_engine import Output, SteppedEngine

PROMPTS = [f"prompt {number} has words" for number in range(50)]


@dataclass
class FakeEngine(SteppedEngine):
    """Each step takes 10 seconds plus one per request in flight, and gives each request
    `tokens_per_step` tokens."""

    tokens_per_step: int = 1
    time: float = 100.0
    left: dict[str, int] = field(default_factory=dict)
    added: list[tuple[str, int]] = field(default_factory=list)
    concurrency: list[int] = field(default_factory=list)
    """Requests in flight during each step."""
    aborted: list[str] = field(default_factory=list)
    emitted: list[tuple[float, int]] = field(default_factory=list)

    def add(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        whole: bool = False,
        **sampling: Any,
    ) -> None:
        assert request_id not in self.left
        assert isinstance(prompt, str)
        assert max_tokens > 0
        assert (whole, sampling) == (False, {"ignore_eos": True})  # as long as asked for
        self.left[request_id] = max_tokens
        self.added.append((prompt, max_tokens))

    def step(self) -> list[Output]:
        assert self.left, "a step of an idle engine would never end"
        self.concurrency.append(len(self.left))
        self.time += 10 + len(self.left)
        outputs = []
        for request_id, left in list(self.left.items()):
            new = min(left, self.tokens_per_step)
            self.left[request_id] -= new
            outputs.append(Output(request_id, [7] * new, new == left))
            if new == left:
                del self.left[request_id]
        self.emitted.append((self.time, sum(len(output.token_ids) for output in outputs)))
        return outputs

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            del self.left[request_id]
        self.aborted += request_ids

    def now(self) -> float:
        return self.time
