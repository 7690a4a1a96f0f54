"""A thinking budget ends only its own request's thinking, in the step that uses it up.

Wrong in vLLM 0.32.0 and 0.33.0, V1 runner. When other requests end and a request moves to the place
of one with a budget, it inherits that budget, so the end of thinking is forced into its text (plain
decoding included). And with a speculative method, `bonus_token_forced`, which means that the end
was forced in this step's bonus row, is not reset after the step. So if a chunk of the prompt, whose
sample is discarded, uses the budget up, one token too many passes; the same happens in a second
stretch of thinking. Not reported yet (docs/engineering/upstream.md). Delete this file when
`sync_batch` clears the place that a request moves to, and `update_state` resets the flag.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import Any

from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

_sync_batch = ThinkingBudgetStateHolder.sync_batch
_update_think_state = ThinkingBudgetStateHolder._update_think_state


def fix_thinking_budgets() -> None:
    """Rebind the methods in this process, a worker. They run once a step, before forcing tokens."""
    ThinkingBudgetStateHolder.sync_batch = sync_batch
    ThinkingBudgetStateHolder._update_think_state = update_think_state


@wraps(_sync_batch, assigned=())
def sync_batch(self: ThinkingBudgetStateHolder, batch_update: BatchUpdate | None) -> None:
    """Update states as requests join, leave and move. A request that moves does not inherit the
    state of its new place."""
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
    """Count a request's thinking, after resetting the last step's flag."""
    state["bonus_token_forced"] = False
    _update_think_state(self, state)
