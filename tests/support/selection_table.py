"""Which draft lengths a step can have on which GPU, as vLLM's own code decides it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from support.faked_cuda import lines_on_cuda

CAPABILITIES = ("8.0", "8.9", "9.0", "10.0", "12.0")
BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "auto")
TARGETS = ("full", "mixed", "hybrid")
LEVELS = ("-O0", "-O1", "-O2", "-O3", "eager")

FEW = "few lengths"
ANY = "any length"
ADAPTIVE = "vLLM's adaptive verification"
REFUSED = "refused"


@dataclass(frozen=True)
class Cell:
    """An engine that is started, as far as it goes without a GPU."""

    capability: str
    backend: str = "auto"
    """Backend of the target's attention."""
    target: str = "full"
    """`mixed`: sliding and full layers. `hybrid`: linear and full ones."""
    level: str = "-O2"
    is_async: bool = True
    drafter_backend: str = "auto"
    is_adaptive: bool = False
    """Whether the user asks for vLLM's adaptive verification."""
    has_kernels: bool = True
    """Whether FlashInfer's precompiled kernels are available."""


@dataclass(frozen=True)
class Row:
    """Properties that the engine would start with."""

    cell: Cell
    error: str = ""
    mechanism: str = ""
    """Which lengths have graphs; or `REFUSED`, if vLLM allows no adaptive verification there."""
    selected: str = ""
    """The backend of the target's full layers."""
    lengths: Sequence[int] = ()
    """Lengths that the scheduler chooses among."""
    ungraphed: Sequence[int] = ()
    """Those of them for which the mode of CUDA graphs promises a graph but has none."""
    draft_widths: Sequence[int] = ()
    """Rows of a block that the drafter's graphs are captured for."""


def cells(capability: str) -> list[Cell]:
    """Return cells in which any two of backend, target, level and scheduling meet, not all four.

    The whole cross product would take four times as long.
    """
    default = Cell(capability)
    found = [replace(default, backend=b, target=t) for b in BACKENDS for t in TARGETS]
    found += [replace(cell, target=t) for cell in others(capability) for t in TARGETS]
    for named in BACKENDS[:-1]:
        cell = replace(default, backend=named)
        found += [replace(cell, level=level) for level in LEVELS if level != default.level]
        found += [replace(cell, is_async=False)]
    return found


def others(capability: str) -> list[Cell]:
    """Return settings that differ from vLLM's defaults in more than the target's backend."""
    default = Cell(capability)
    return [
        *(replace(default, level=level) for level in LEVELS if level != default.level),
        replace(default, is_async=False),
        replace(default, is_async=False, level="eager"),
        replace(default, is_adaptive=True),
        replace(default, is_adaptive=True, backend="TRITON_ATTN"),
        replace(default, backend="FLASHINFER", has_kernels=False),
        replace(default, backend="TRITON_ATTN", drafter_backend="FLASHINFER"),
    ]


def rows() -> list[Row]:
    """Return rows of all cells, from a process of its own whose platform is a faked CUDA."""
    lines = lines_on_cuda("support.selection_child")
    return [Row(**{**line, "cell": Cell(**line["cell"])}) for line in lines]


def to_line(row: Row) -> str:
    return json.dumps(asdict(row))
