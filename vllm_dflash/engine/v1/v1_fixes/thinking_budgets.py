"""A thinking budget ends the thinking of the request that has it, in the step that uses it up.

Wrong in vLLM 0.32.0 and 0.33.0, V1 runner. A request that takes the place of one with a budget,
when a batch closes up, inherits that budget, so the end of thinking is forced into its text (plain
decoding included). And with a speculative method, `bonus_token_forced`, which says that the end
has been forced in this step's bonus row, is not forgotten with the step: a budget that is used up
by a chunk of the prompt, whose sample is discarded, lets one token too many pass, and so does a
second stretch of thinking. Not reported yet (docs/engineering/upstream.md). Delete this file when
`sync_batch` clears the place that a request moves to, and `update_state` the flag.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import Any

from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

_sync_batch = ThinkingBudgetStateHolder.sync_batch
_update_think_state = ThinkingBudgetStateHolder._update_think_state


def mend_thinking_budgets() -> None:
    """In a worker: rebind the methods, which run once a step, before anything is forced."""
    ThinkingBudgetStateHolder.sync_batch = sync_batch
    ThinkingBudgetStateHolder._update_think_state = update_think_state


@wraps(_sync_batch, assigned=())
def sync_batch(self: ThinkingBudgetStateHolder, batch_update: BatchUpdate | None) -> None:
    """Update states as requests join, leave and move; a request that moves does not inherit the
    state of the place it takes."""
    if batch_update is None:
        return
    _sync_batch(self, replace(batch_update, moved=[]))
    for origin, goal, direction in batch_update.moved:
        moves, stays = self._state.pop(origin, None), self._state.pop(goal, None)
        if moves is not None:
            self._state[goal] = moves
        if stays is not None and direction == MoveDirectionality.SWAP:
            self._state[origin] = stays


@wraps(_update_think_state, assigned=())
def update_think_state(self: ThinkingBudgetStateHolder, state: dict[str, Any]) -> None:
    """Count a request's thinking, in a step that has forced nothing so far."""
    state["bonus_token_forced"] = False
    _update_think_state(self, state)
