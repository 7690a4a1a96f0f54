"""Limits of drafts that requests set for themselves (`max_drafts`, `config/request_options.py`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_dflash.checkpoint.refusal import LARGEST
from vllm_dflash.config.request_options import most_drafts
from vllm_dflash.planning import Ints


class OwnLimits(dict[str, int]):
    """Most drafts of each running request that sets a limit. Empty where none does, which is
    usual, and then costs nothing."""

    def take(self, scheduler_output: SchedulerOutput) -> bool:
        """Forget requests that have ended, and read the limits of those that join in this step.

        Returns:
            Whether any join.
        """
        joining = scheduler_output.scheduled_new_reqs
        if self:
            # A name may come again, as another request or as the next turn of a session.
            for name in [*scheduler_output.finished_req_ids, *(new.req_id for new in joining)]:
                self.pop(name, None)
        for new in joining:
            if new.sampling_params is None or not new.sampling_params.extra_args:
                continue
            with suppress(ValueError):  # a front end without our checks must not end the engine
                most = most_drafts(new.sampling_params.extra_args)
                if most is not None:
                    self[new.req_id] = most
        return bool(joining)

    def cut(self, limits: Ints, names: Sequence[str]) -> Ints:
        """Lower the most drafts that each request can use, [R], to its own limit."""
        if not self:
            return limits
        return np.minimum(limits, [self.get(name, LARGEST) for name in names])

    def forbid_all(self, names: Collection[str]) -> bool:
        """Whether none of these requests wants drafts."""
        return bool(self) and all(self.get(name) == 0 for name in names)
