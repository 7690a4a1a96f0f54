"""Drafts that nobody made.

vLLM pads a request that was just admitted or resumed, and whose prompt is cached but for one
token, with K placeholders, so that its rows look like those of the others (`Scheduler.schedule`,
under either way of scheduling, unless lengths come from a table by batch size). They come out
rejected and say nothing about the drafter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_dflash.planning import Bools


def newly_admitted(step: SchedulerOutput) -> set[str]:
    """Requests that have no drafts of their own yet in this step: any are placeholders."""
    admitted = {request.req_id for request in step.scheduled_new_reqs}
    return admitted | step.scheduled_cached_reqs.resumed_req_ids


def have_own_drafts(ids: Sequence[str], admitted: Collection[str]) -> Bools:
    """Whether drafts of each request are the drafter's, [R]."""
    if not admitted:  # nearly every step
        return np.ones(len(ids), dtype=bool)
    return np.array([name not in admitted for name in ids], dtype=bool)
