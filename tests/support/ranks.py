"""The drafter on two tensor-parallel ranks, a process each, without an engine around them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from support.cached_drafter import Row
from support.drafter_harness import ProposerHarness
from support.pairs import Pair

SECONDS = 240


def draft_on_ranks(
    folder: Path, tasks: Sequence[tuple[Pair, list[torch.Tensor], dict[str, Any]]], num_ranks: int
) -> list[list[dict[str, Any]]]:
    """Return drafts, logits, kv_heads and mlp_rows of each rank in each task; by task, then rank.

    A task is a pair, the context of each request [T, m * H], and options of the speculative
    config.
    """
    processes = get_context("spawn")
    ranks = [
        processes.Process(target=_run, args=(rank, num_ranks, folder, list(tasks)))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(SECONDS)
            assert process.exitcode == 0
    finally:
        for process in ranks:
            process.kill()
            process.join()
    told = [torch.load(folder / f"{rank}.pt") for rank in range(num_ranks)]
    return [list(of_task) for of_task in zip(*told, strict=True)]


def _run(rank: int, num_ranks: int, folder: Path, tasks: list[Any]) -> None:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_DIST_IDENT"] = folder.name  # an engine's worker sets it
    torch.set_num_threads(1)
    results = []
    for pair, contexts, options in tasks:
        harness = ProposerHarness(
            pair, rank=rank, num_ranks=num_ranks, rendezvous=str(folder / "rendezvous"), **options
        )
        rows = [Row(number, context, bonus=7 + number) for number, context in enumerate(contexts)]
        drafts = harness.step(rows)
        layer = harness.proposer.model.block.layers[0]
        results.append(
            {
                "drafts": drafts,
                "logits": harness.logits,
                "kv_heads": layer.self_attn.attn.num_kv_heads,
                "mlp_rows": layer.mlp.down_proj.input_size_per_partition,
            }
        )
    torch.save(results, folder / f"{rank}.pt")
    torch.distributed.barrier()  # no rank exits while another one reads
    torch.distributed.destroy_process_group()
