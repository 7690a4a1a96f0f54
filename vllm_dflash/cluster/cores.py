"""Which cores a worker computes on, among those of its node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Core:
    """A logical CPU. Those that share a physical core have the same `core`."""

    cpu: int
    core: int
    memory_node: int


def share_of_cores(
    cpus: Sequence[Core], binding: str, local_rank: int, local_workers: int
) -> list[int] | None:
    """The logical CPUs of a worker; None: wherever the system puts it.

    Args:
        cpus: those that the worker's process may use.
        binding: as in vLLM's VLLM_CPU_OMP_THREADS_BIND. "auto" deals out the physical cores of a
            node in equal parts, by memory node, a logical CPU of each; "nobind"; or lists such as
            "0-31|32-63", a part for each worker of a node.
        local_rank: of the worker, among
        local_workers: of this engine on its node.

    Raises:
        ValueError: the lists have too few parts, or something is not a number.
    """
    if binding == "nobind":
        return None
    if binding != "auto":
        parts = binding.split("|")
        if local_rank >= len(parts):
            raise ValueError(
                f"VLLM_CPU_OMP_THREADS_BIND={binding!r} names cores for {len(parts)} workers, but"
                f" {local_workers} workers run on this node. Write a list for each, separated"
                " by '|', or leave it out."
            )
        return _parse(parts[local_rank])
    # One thread per core: two of them would share its arithmetic units.
    first = {(cpu.memory_node, cpu.core): cpu.cpu for cpu in sorted(cpus, key=lambda c: -c.cpu)}
    ordered = [first[key] for key in sorted(first)]
    if len(ordered) < local_workers:
        return None
    start, end = (len(ordered) * rank // local_workers for rank in (local_rank, local_rank + 1))
    return sorted(ordered[start:end])


def _parse(text: str) -> list[int]:
    cpus = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return sorted(cpus)
