"""The plan that steps repeat until the next one is made."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.request import Request

from vllm_dflash.engine.v2.exchange import StepPlan


def can_use_drafts(request: Request | None, context_len: int) -> bool:
    """Whether a request will be past its prompt after a step, and not at its end.

    It needs three more tokens to use drafts: this step's, a draft, and the bonus token after it.
    """
    return request is not None and context_len >= request.num_tokens and tokens_left(request) > 2


def tokens_left(request: Request) -> int:
    """Number of tokens that a request may still get, as far as known by now."""
    return request.num_prompt_tokens + request.max_tokens - request.num_tokens


class PlanCache:
    """The last plan that was no experiment. Repeating it for the same requests costs no loop."""

    def __init__(
        self, longest: int, width: int, own_limits: Mapping[str, int], *, is_fixed: bool
    ) -> None:
        """Repeat drafts of up to K tokens for requests of up to `longest` tokens. `own_limits`: of
        requests that set one (`OwnLimits`). `is_fixed`: there are drafts after each step, used or
        not."""
        self._longest, self._width, self._is_fixed = longest, width, is_fixed
        self._own_limits = own_limits
        self._lengths: Mapping[str, int] = {}
        self._runs_block = False
        self._last = StepPlan()
        self._scheduled: Mapping[str, int] = {}
        """Requests for which it was last repeated, and their rows."""
        self._valid_for = 0
        """Steps for which none of these comes to a limit."""

    def __bool__(self) -> bool:
        """Whether there is a plan."""
        return bool(self._lengths)

    def keep_plan(self, lengths: Mapping[str, int], *, runs_block: bool) -> None:
        """Repeat a plan from now on: the draft length of each request, and whether a block runs."""
        self._lengths, self._runs_block = lengths, runs_block
        self.expire()

    def expire(self) -> None:
        """Look at all requests again in the next step that repeats the plan: this one does not."""
        self._valid_for = 0

    def repeat(self, scheduled: Mapping[str, int], requests: Mapping[str, Request]) -> StepPlan:
        """Return the plan for a step of R requests, in which these numbers of tokens are scheduled.

        Requests that are new since it was made get its longest length.
        """
        if self._valid_for > 0 and self._scheduled == scheduled:  # nobody is back in a prompt
            self._valid_for -= 1
            return self._last
        most, any_eligible, all_decode, left = max(self._lengths.values()), self._is_fixed, True, 0
        lengths: dict[str, int] = {}
        room = self._longest
        for name, rows in scheduled.items():
            request = requests.get(name)
            context = rows + (request.num_computed_tokens if request else 0)
            room = min(room, self._longest - context - 2)
            own = self._own_limits.get(name, self._width)
            limit = max(0, min(self._longest - context - 2, self._width, own))
            lengths[name] = min(self._lengths.get(name, most), limit)
            if request is None or context < request.num_tokens:
                all_decode = False
            elif own:
                left = max(left, tokens_left(request))
        any_eligible = any_eligible or left > 2
        self._last = StepPlan.from_lengths(
            lengths, runs_block=self._runs_block, any_eligible=any_eligible, is_new=False
        )
        # A step adds 1 + K tokens at most. Until then, each length and `any_eligible` stay.
        self._scheduled, self._valid_for = scheduled, 0
        if all_decode:
            until = room - self._width if self._is_fixed else min(room - self._width, left - 3)
            self._valid_for = max(until // (1 + self._width), 0)
        return self._last
