"""Answers of an engine whose steps are timed while every request decodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_dflash.tools.engine_answers import EngineAnswers

START = "vllm_dflash.tools.bench.step_answers:StepAnswers.start"
"""What an `EngineProcess` starts for these answers."""
DOES_NOT_FIT = (
    "the engine does not hold all requests: {served} of {all} decode in a step. Lower --concurrency"
    " or --context, or raise VLLM_CPU_KVCACHE_SPACE (on CPUs) or --kv-cache-memory-bytes. If the"
    " first answers end while prompts are still read, raise --max-model-len."
)
WRONG_DRAFTS = (
    "vLLM verified {draft_tokens:.0f} drafts of {all} and accepted {accepted_tokens:.0f}, so these"
    " steps cannot be compared: raise --max-model-len, or lower --concurrency or K."
)


class StepAnswers(EngineAnswers):
    """Answers how long a step takes."""

    def steps(
        self, prompts: list[str], context: int, concurrency: int, tokens: int, seconds: float
    ) -> dict[str, Any]:
        """Time steps in which all requests decode; the median counts.

        At most `tokens` steps, and no new one after `seconds`. Each request has its own prompt of
        `context` tokens, cut from all `prompts`, whose first token no other request has. Needs an
        engine with statistics.

        Raises:
            ValueError: not all requests ran in each of these steps, or not all drafts were verified
                and rejected.
        """
        words = [token for text in self.encode(prompts) for token in text]
        names = [str(number) for number in range(concurrency)]
        room = self._engine.model_config.max_model_len - context
        for number, name in enumerate(names):
            first = number * context % len(words)
            turned = words[first:] + words[:first]
            prompt = (turned * -(-context // len(words)))[:context]
            self.add(name, [number + 1, *prompt[1:]], room, ignore_eos=True)
        silent = set(names)
        while silent:
            silent -= {output.request_id for output in self.step()}
        before, ends = self.counts(), [self.now()]
        while len(ends) <= tokens and ends[-1] - ends[0] < seconds:
            if outputs := self.step():
                ends.append(self.now())
                if len(outputs) < concurrency:
                    raise ValueError(DOES_NOT_FIT.format(served=len(outputs), all=concurrency))
        after, times = self.counts(), np.diff(ends)
        self.abort(names)
        drafts = self._engine.vllm_config.num_speculative_tokens * concurrency * len(times)
        check_drafts({name: after[name] - before[name] for name in after}, drafts)
        return {"steps": len(times), "step_seconds": float(np.median(times))}


def check_drafts(counts: dict[str, float], expected: int) -> None:
    """Check that all expected drafts were verified, and none accepted.

    Raises:
        ValueError: it is otherwise, so the times would say nothing.
    """
    found = {"draft_tokens": 0.0, "accepted_tokens": 0.0, **counts}
    if found["draft_tokens"] != expected or found["accepted_tokens"]:
        raise ValueError(WRONG_DRAFTS.format(all=expected, **found))
