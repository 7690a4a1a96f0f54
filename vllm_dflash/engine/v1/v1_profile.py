"""Profile at start-up on V1: target, drafter and context store, each separately."""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_dflash.engine.block_layout import block_inputs
from vllm_dflash.engine.profile import (
    CONTEXT_TOKENS,
    measure_attention,
    measure_curve,
    profiled_rows,
    target_alone,
)
from vllm_dflash.model.adapters import WithoutLoRA
from vllm_dflash.planning.costs import StepCosts

POWERS = tuple(2**power for power in range(11))


@torch.inference_mode()
def profile_v1(runner: GPUModelRunner) -> StepCosts:
    """Measure the cost of each part of a step.

    In a step the drafter runs after the target, whose weights have passed through the processor's
    caches. So the drafter and the context store are also measured after a run of the target.
    """
    proposer = runner.drafter
    max_requests, first_draft_row = proposer.max_batch_size, proposer.spec.first_draft_row
    block_rows = first_draft_row + proposer.width
    most = min(runner.max_num_tokens, max_requests * block_rows)
    # Free drafts are longer than a block, so a few requests can have more rows.
    reach = max(most, min(runner.max_num_tokens, 4 * (1 + proposer.num_speculative_tokens)))
    features = torch.zeros(most, proposer.feature_width, dtype=proposer.dtype)
    positions = torch.arange(most) % proposer.max_model_len
    nowhere = torch.full((most,), -1)
    longest = runner.max_model_len - block_rows
    unadapted = WithoutLoRA(runner.model)  # LoRA wrappers expect only the rows that are sampled

    def verify(rows: int, context: int, *, of_one: bool = False) -> None:
        with target_alone(proposer):
            hidden, _ = runner._dummy_run(
                rows, force_attention=True, profile_seq_lens=context, uniform_decode=of_one
            )
        with unadapted:
            runner.model.compute_logits(hidden)

    def draft(rows: int, context: int) -> None:
        requests = -(-rows // block_rows)
        table = torch.zeros(
            requests, -(-runner.max_model_len // proposer.block_size), dtype=torch.int32
        )
        inputs = block_inputs(
            np.full(requests, context),
            np.full(requests, rows // requests - first_draft_row),
            np.zeros(requests, dtype=np.int32),
            proposer.spec.mask_token_id,
            table.numpy(),
            proposer.block_size,
            first_draft_row,
        )
        inputs.slots[:] = -1  # nothing is written
        newest = features[:requests] if proposer.block.reads_newest else None
        proposer.block.draft(inputs, table, newest)

    def store(rows: int) -> None:
        proposer.model.context.store(features[:rows], positions[:rows], nowhere[:rows])

    near = min(CONTEXT_TOKENS, max(longest, 1))

    def target() -> None:
        verify(1, near)

    parts = {max(block_rows // 4, 2), max(block_rows // 2, 2)}
    blocks = sorted(parts | {n for each in POWERS if (n := block_rows * each) <= most})
    contexts = [rows for rows in POWERS if rows <= most]
    return StepCosts(
        measure_curve(lambda rows: verify(rows, near), profiled_rows(max_requests, reach)),
        measure_curve(lambda rows: draft(rows, near), blocks, before=target),
        measure_curve(store, contexts, share=0.5, before=target),
        max_requests,
        measure_attention(
            lambda rows, context: verify(rows, context, of_one=rows > 1), draft, block_rows, longest
        ),
        first_draft_row,
    )
