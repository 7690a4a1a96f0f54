"""Over how many tensor-parallel ranks a drafter's layers are split: all of them, or none."""

from __future__ import annotations

from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec


def undivided(drafter: DrafterSpec, tp_size: int) -> list[str]:
    """What of the drafter does not divide among so many ranks, in words; empty if all does.

    Fewer key/value heads than ranks do, where they divide those: ranks then share a head.
    """
    found = [
        f"{count} {what}"
        for what, count in (
            ("attention heads", drafter.num_heads),
            ("rows of its MLP (intermediate_size)", drafter.intermediate_size),
        )
        if count % tp_size
    ]
    heads = drafter.num_kv_heads
    if heads % tp_size and tp_size % heads:
        found.append(f"{heads} key/value heads")
    return found


def drafter_ranks(drafter: DrafterSpec, tp_size: int, asked: int | None = None) -> int:
    """`tp_size` where the drafter's layers are split, 1 where every rank has them whole.

    Args:
        drafter: what is split.
        tp_size: ranks of the target.
        asked: `draft_tensor_parallel_size` of the speculative config.

    Raises:
        DrafterError: it was asked to be split in another way, or does not divide.
    """
    if asked is None:
        return 1 if undivided(drafter, tp_size) else tp_size
    if asked not in (1, tp_size):
        raise DrafterError(
            f"draft_tensor_parallel_size is {asked}, the target's tensor_parallel_size {tp_size}:"
            f" a drafter is split like its target or not at all, so write {tp_size} or 1, or leave"
            " it out."
        )
    if asked > 1 and (parts := undivided(drafter, tp_size)):
        raise DrafterError(
            f"drafter {drafter.model!r} does not divide by draft_tensor_parallel_size {asked}:"
            f" {', '.join(parts)}. Leave it out, and every rank has the whole drafter."
        )
    return asked


def describe_ranks(drafter: DrafterSpec, tp_size: int, ranks: int) -> str:
    """A sentence for the log on how a drafter lies on several ranks."""
    if ranks > 1:
        return f"the drafter is split over {ranks} ranks, like the target"
    parts = undivided(drafter, tp_size)
    why = f"{', '.join(parts)} do not divide by {tp_size}" if parts else "as configured"
    return f"every one of {tp_size} ranks has the whole drafter ({why})"
