"""Facts about drafting in vLLM's `SchedulerOutput`: placeholders, and newly allocated cache blocks.
Also the room that a step has for drafts.

If a request was just admitted or resumed, and all but one token of its prompt is cached, vLLM pads
it with K placeholders, so that its rows look like those of the others (`Scheduler.schedule`,
synchronous or asynchronous, unless lengths come from a table by batch size). Placeholders are
rejected and say nothing about the drafter.
"""

from __future__ import annotations

import logging
from copy import copy

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_dflash.config.engine_options import EngineOptions


def never_drafts(scheduler_output: SchedulerOutput) -> bool:
    """Whether vLLM (0.33 and later) drafts nothing after this step, since its requests are all in
    their prompts or at their ends."""
    return getattr(scheduler_output, "skip_drafts", False)


def newly_admitted(scheduler_output: SchedulerOutput) -> set[str]:
    """Requests without drafts of their own in this step: any they have are placeholders."""
    admitted = {request.req_id for request in scheduler_output.scheduled_new_reqs}
    return admitted | scheduler_output.scheduled_cached_reqs.resumed_req_ids


def fresh_cache_blocks(scheduler_output: SchedulerOutput, group: int, page_size: int) -> list[int]:
    """Blocks of a cache group that a step allocates, without those of a cached prefix."""
    fresh: list[int] = []
    for request in scheduler_output.scheduled_new_reqs:
        fresh += request.block_ids[group][-(-request.num_computed_tokens // page_size) :]
    going_on = scheduler_output.scheduled_cached_reqs
    for name, blocks, computed in zip(
        going_on.req_ids, going_on.new_block_ids, going_on.num_computed_tokens, strict=True
    ):
        if blocks is not None:  # all blocks of a resumed request, else the new ones
            found = -(-computed // page_size) if name in going_on.resumed_req_ids else 0
            fresh += blocks[group][found:]
    return fresh


def room_for_blocks(config: VllmConfig) -> VllmConfig:
    """A config with which vLLM reserves room, in a step and in the cache, for each request's block.

    With the original config, vLLM would reserve room for the longest draft. Free drafts and trees
    may be longer than a block, but the ones that a step verifies are among its tokens anyway.
    Returns `config` itself if no draft is longer than a block.
    """
    width = EngineOptions.from_config(config).draft_width
    narrow, speculative = copy(config), copy(config.speculative_config)
    assert speculative is not None
    if speculative.num_speculative_tokens == width:
        return config
    speculative.num_speculative_tokens = width
    narrow.speculative_config = speculative
    return narrow


def batch_too_small_warning(config: VllmConfig) -> tuple[int, str] | None:
    """Log level and message if `max_num_batched_tokens` is too small for drafts or for all
    requests; None if it is large enough.

    vLLM 0.32 reserves K rows of a step for each request's block. 0.33 reserves none; it admits only
    as many requests as have room for a block, and logs that.
    """
    width, schedule = EngineOptions.from_config(config).draft_width, config.scheduler_config
    assert config.speculative_config is not None
    if not config.speculative_config.max_num_new_slots_for_drafting:
        return None
    rows, most = schedule.max_num_batched_tokens, schedule.max_num_seqs
    if rows < 2 + width:
        return logging.WARNING, (
            f"max_num_batched_tokens is {rows}, of which vLLM keeps {width} for a request's block,"
            f" so no draft is ever verified: raise it to {1 + 2 * width} at least."
        )
    if rows < (1 + width) * most:
        return logging.INFO, (
            f"max_num_batched_tokens is {rows}: a step has room for {rows // (1 + width)} of up to"
            f" {most} requests (max_num_seqs), since vLLM keeps {width} rows for the block of each."
        )
    return None
