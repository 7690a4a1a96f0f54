"""On V1, a thinking budget is enforced in another request's text, or a token late.

Delete this file when `sync_batch` clears the place that a request moves to, and `update_state`
resets `bonus_token_forced` (docs/engineering/upstream.md#thinking_budgetspy).
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
