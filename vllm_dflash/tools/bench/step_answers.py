"""Answers of an engine whose steps are timed while every request decodes."""

from __future__ import annotations

from typing import Any

from vllm_dflash.tools.engine_answers import EngineAnswers

START = "vllm_dflash.tools.bench.step_answers:StepAnswers.start"
"""What an `EngineProcess` starts for these answers."""
DOES_NOT_FIT = (
    "the engine does not hold all requests: {served} of {all} decode in a step. Lower --concurrency"
    " or --context, or raise VLLM_CPU_KVCACHE_SPACE (on CPUs) or --kv-cache-memory-bytes."
)


class StepAnswers(EngineAnswers):
    """Answers how long a step takes."""

    def steps(
        self, prompts: list[str], context: int, concurrency: int, tokens: int, seconds: float
    ) -> dict[str, Any]:
        """Time steps in which all requests decode, and add the increase of `counts`.

        At most `tokens` steps, and no new one after `seconds`. Each request has its own prompt of
        `context` tokens, cut from all `prompts`, whose first token no other request has.

        Raises:
            ValueError: the engine did not run all requests in each of these steps.
        """
        words = [token for text in self.encode(prompts) for token in text]
        names = [str(number) for number in range(concurrency)]
        for name in names:
            first = int(name) * context % len(words)
            turned = words[first:] + words[:first]
            prompt = (turned * -(-context // len(words)))[:context]
            self.add(name, [int(name) + 1, *prompt[1:]], self._room - context, ignore_eos=True)
        silent = set(names)
        while silent:
            silent -= {output.request_id for output in self.step()}
        before, opened, count = self.counts(), self.now(), 0
        while count < tokens and (count == 0 or self.now() - opened < seconds):
            outputs = self.step()
            count += bool(outputs)
            if outputs and len(outputs) < concurrency:
                raise ValueError(DOES_NOT_FIT.format(served=len(outputs), all=concurrency))
        took, after = self.now() - opened, self.counts()
        self.abort(names)
        counts = {name: after[name] - before[name] for name in after}
        return {"steps": count, "step_seconds": took / count, "counts": counts}

    @property
    def _room(self) -> int:
        return self._engine.model_config.max_model_len
