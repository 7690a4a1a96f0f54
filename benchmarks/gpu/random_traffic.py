"""Random requests and hang-ups for an engine, in the engine's process."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from stepped_engine import SteppedEngine


class SoakedEngine(SteppedEngine):
    """Answers that include random traffic."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._names = map(str, itertools.count())
        self._live: dict[str, tuple[int, int] | None] = {}
        """Prompt and most tokens of each request in flight; None: it is not compared."""
        self._seen: Counter[str] = Counter()
        self._texts: dict[tuple[int, int, tuple[int, ...]], None] = {}

    def traffic(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[int],
        others: Sequence[dict[str, Any]],
        most: int,
        seed: int,
        seconds: float,
    ) -> dict[str, Any]:
        """Let requests arrive and hang up for `seconds`.

        Args:
            prompts: token ids.
            tokens: numbers of tokens that a request may ask for.
            others: sampling settings of requests that are there to interfere, and are not compared.
            most: requests in flight; half as many more wait.
            seed: of what happens when, as far as time does not decide.
            seconds: time after which it returns. Requests in flight continue in the next call.

        Returns:
            The result of `so_far`.
        """
        draw = random.Random(seed)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            kind = draw.random()
            if kind < 0.3 or not self._live:
                for _ in range(min(draw.randint(1, 8), most + most // 2 - len(self._live))):
                    self._ask(draw, prompts, tokens, others)
            elif kind < 0.4:
                alive = sorted(self._live)
                self._hang_up(draw.sample(alive, draw.randint(1, min(4, len(alive)))))
            elif kind < 0.402:
                self._hang_up(sorted(self._live))
            else:
                for _ in range(draw.randint(1, 6)):
                    self._step()
        return self.so_far()

    def settle(self) -> dict[str, Any]:
        """Serve the requests that are left."""
        while self._live:
            self._step()
        return self.so_far()

    def so_far(self) -> dict[str, Any]:
        """Return events by name, and each text that was written: prompt, most tokens, tokens."""
        for metric in self._engine.get_metrics():
            if metric.name == "vllm:num_preemptions" and hasattr(metric, "value"):
                self._seen["preempted"] = int(metric.value)
        return {"seen": dict(self._seen), "texts": [[*text] for text in self._texts]}

    def _ask(
        self,
        draw: random.Random,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[int],
        others: Sequence[dict[str, Any]],
    ) -> None:
        name = next(self._names)
        prompt, limit = draw.randrange(len(prompts)), draw.choice(tokens)
        is_compared = draw.random() < 0.7
        self._live[name] = (prompt, limit) if is_compared else None
        more = {} if is_compared else draw.choice(others)
        self.add(name, prompts[prompt], limit, whole=True, **more)

    def _hang_up(self, names: list[str]) -> None:
        self.abort(names)
        for name in names:
            del self._live[name]
        self._seen["hung up"] += len(names)

    def _step(self) -> None:
        if not self._live:
            return
        for output in self.step():
            asked = self._live.pop(output.request_id, None)
            self._seen["served"] += 1
            self._seen["tokens"] += len(output.token_ids)
            if asked is not None:
                self._texts[(*asked, tuple(output.token_ids))] = None
