"""A thinking budget forces its end in the step in which it is used up.

Wrong in vLLM 0.32.0 and 0.33.0, V1 runner, with a speculative method: `bonus_token_forced` says
that the end has been forced in this step's bonus row, and is not forgotten with the step. So a
budget that is used up while a chunk of the prompt runs, whose sample is discarded, lets one token
too many pass, and so does the second stretch of thinking of a request. Not reported yet
(docs/engineering/upstream.md). Delete this file when `update_state` clears it.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

_update_think_state = ThinkingBudgetStateHolder._update_think_state


def mend_forced_thinking() -> None:
    """In a worker: rebind the method, which runs once a step for each request, before forcing."""
    ThinkingBudgetStateHolder._update_think_state = update_think_state


@wraps(_update_think_state, assigned=())
def update_think_state(self: ThinkingBudgetStateHolder, state: dict[str, Any]) -> None:
    """Count a request's thinking, in a step that has forced nothing so far."""
    state["bonus_token_forced"] = False
    _update_think_state(self, state)
