"""Facts about drafting in vLLM's `SchedulerOutput`: placeholders, and newly allocated cache blocks.

If a request was just admitted or resumed, and all but one token of its prompt is cached, vLLM pads
it with K placeholders, so that its rows look like those of the others (`Scheduler.schedule`,
synchronous or asynchronous, unless lengths come from a table by batch size). Placeholders are
rejected and say nothing about the drafter.
"""

from __future__ import annotations

from copy import copy

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_dflash.config.mode import Mode


def never_drafts(scheduler_output: SchedulerOutput) -> bool:
    """Whether vLLM (0.33 and later) drafts nothing after this step, since its requests are all in
    their prompts or at their ends."""
    return getattr(scheduler_output, "skip_drafts", False)


def newly_admitted(scheduler_output: SchedulerOutput) -> set[str]:
    """Requests without drafts of their own in this step: any they have are placeholders."""
    admitted = {request.req_id for request in scheduler_output.scheduled_new_reqs}
    return admitted | scheduler_output.scheduled_cached_reqs.resumed_req_ids


def fresh_cache_blocks(scheduler_output: SchedulerOutput, group: int, block_size: int) -> list[int]:
    """Blocks of a cache group that a step allocates, without those of a cached prefix."""
    fresh: list[int] = []
    for request in scheduler_output.scheduled_new_reqs:
        fresh += request.block_ids[group][-(-request.num_computed_tokens // block_size) :]
    going_on = scheduler_output.scheduled_cached_reqs
    for name, blocks, computed in zip(
        going_on.req_ids, going_on.new_block_ids, going_on.num_computed_tokens, strict=True
    ):
        if blocks is not None:  # all blocks of a resumed request, else the new ones
            found = -(-computed // block_size) if name in going_on.resumed_req_ids else 0
            fresh += blocks[group][found:]
    return fresh


def room_for_blocks(config: VllmConfig) -> VllmConfig:
    """A config with which vLLM reserves room, in a step and in the cache, for each request's block.

    With the original config, vLLM would reserve room for the longest draft. Free drafts and trees
    may be longer than a block, but the ones that a step verifies are among its tokens anyway.
    Returns `config` itself if no draft is longer than a block.
    """
    width = Mode.of(config).draft_width
    narrow, speculative = copy(config), copy(config.speculative_config)
    assert speculative is not None
    if speculative.num_speculative_tokens == width:
        return config
    speculative.num_speculative_tokens = width
    narrow.speculative_config = speculative
    return narrow
