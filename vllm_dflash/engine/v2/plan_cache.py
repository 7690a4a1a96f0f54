"""The plan that steps repeat until the next one is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from vllm.v1.request import Request

from vllm_dflash.engine.v2.exchange import StepPlan
from vllm_dflash.planning import Ints


def lens_after(scheduled: Mapping[str, int], requests: Mapping[str, Request]) -> tuple[Ints, Ints]:
    """Return what is known of R requests after a step that is being scheduled, [R] each.

    The tokens of context of each, at most: it is not known yet how many of its drafts are accepted.
    And how many tokens it may still get; -1: it has ended, or is still in its prompt.
    """
    lens, left = [], []
    for name, rows in scheduled.items():  # hundreds of requests: as little as possible for each
        request = requests.get(name)
        if request is None:  # ended or aborted meanwhile
            lens.append(rows)
            left.append(-1)
            continue
        lens.append(context := rows + request.num_computed_tokens)
        known = request.num_tokens
        most = request.num_prompt_tokens + request.max_tokens
        left.append(most - known if context >= known else -1)
    return np.array(lens, dtype=np.int64), np.array(left, dtype=np.int64)


class PlanCache:
    """The last plan that was no experiment."""

    def __init__(self, most_drafts: int) -> None:
        """Keep plans for up to `most_drafts` of a request."""
        self._most_drafts = most_drafts
        self._lengths: dict[str, int] = {}
        self.runs_block = False
        self._last = StepPlan()
        """Plan of the last step that repeated it."""
        self._scheduled: Mapping[str, int] = {}
        """Requests of that step, and their rows."""
        self._valid_for = 0
        """Steps for which none of these comes to a limit."""

    def __bool__(self) -> bool:
        """Whether there is a plan."""
        return bool(self._lengths)

    def keep(self, names: Sequence[str], lengths: Ints, limits: Ints, *, runs_block: bool) -> None:
        """Repeat a plan from now on: the drafts of R requests, and the most that each could use,
        [R] each, and whether a block runs."""
        self.expire()
        self._lengths, self.runs_block = {}, runs_block
        if limits.any():  # else nothing was chosen
            # A request near its end gets a short length for that reason alone. When the plan is
            # repeated, it and others use the length of the request that has most room.
            freest = int(limits.argmax())
            most = int(lengths[freest])
            most = self._most_drafts if most == limits[freest] else most
            kept = np.where(lengths < limits, lengths, most)
            self._lengths = dict(zip(names, kept.tolist(), strict=True))

    def lengths(self, names: Sequence[str], limits: Ints) -> Ints:
        """Return the drafts of R requests, within limits, [R] each. Requests that are new since the
        plan was made get its longest length."""
        longest = max(self._lengths.values())
        kept = [self._lengths.get(name, longest) for name in names]
        return np.minimum(np.array(kept, dtype=np.int64), limits)

    def hold(self, plan: StepPlan, scheduled: Mapping[str, int], room: int) -> None:
        """Take a step's plan for the same one in the next steps, until one of its requests may be
        `room` rows longer."""
        self._last, self._scheduled = plan, scheduled
        self._valid_for = max(room, 0) // (1 + self._most_drafts)

    def expire(self) -> None:
        """Look at all requests again in the next step that repeats the plan: this one does not."""
        self._valid_for = 0

    def unchanged(self, scheduled: Mapping[str, int]) -> StepPlan | None:
        """Return the last plan if it is also that of a step in which these numbers of tokens are
        scheduled, without a look at any request."""
        if self._valid_for > 0 and self._scheduled == scheduled:  # nobody is back in a prompt
            self._valid_for -= 1
            return self._last
        return None
