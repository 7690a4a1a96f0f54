"""Which draft lengths a step can have on which GPU, as vLLM's own code decides it.

`make selection` writes the table into docs/compatibility.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from support import ROOT
from support.faked_cuda import lines_on_cuda

CAPABILITIES = ("8.0", "8.9", "9.0", "10.0", "12.0")
BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "auto")
TARGETS = ("full", "mixed", "hybrid")
LEVELS = ("-O0", "-O1", "-O2", "-O3", "eager")

FEW = "few lengths"
ANY = "any length"
ADAPTIVE = "vLLM's adaptive verification"
REFUSED = "refused"

PAGE = ROOT / "docs" / "compatibility.md"
MARK = "<!-- {} of what `make selection` writes with vLLM {} -->\n"


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


def markdown(table: Sequence[Row]) -> str:
    """Return the text between the two marks of the page."""
    return "".join(f"{line}\n" for line in (*_by_backend(table), "", *_by_setting(table)))


def _by_backend(table: Sequence[Row]) -> Iterator[str]:
    by_cell = {row.cell: row for row in table}
    yield f"| capability | layers | {' | '.join(BACKENDS)} |"
    yield "|---" * (2 + len(BACKENDS)) + "|"
    for capability in CAPABILITIES:
        targets: dict[tuple[str, ...], list[str]] = {}
        for target in TARGETS:
            *named, chosen = (by_cell[Cell(capability, b, target)] for b in BACKENDS)
            words = (*(row.mechanism for row in named), f"{chosen.selected}: {chosen.mechanism}")
            targets.setdefault(words, []).append(target)
        for words, names in targets.items():
            yield f"| {capability} | {', '.join(names)} | {' | '.join(words)} |"


def _by_setting(table: Sequence[Row]) -> Iterator[str]:
    mechanisms = {row.cell: row.mechanism for row in table}
    yield f"| setting | layers | {' | '.join(CAPABILITIES)} |"
    yield "|---" * (2 + len(CAPABILITIES)) + "|"
    for settings in zip(*(others(capability) for capability in CAPABILITIES), strict=True):
        targets: dict[tuple[str, ...], list[str]] = {}
        for target in TARGETS:
            words = tuple(mechanisms[replace(cell, target=target)] for cell in settings)
            targets.setdefault(words, []).append(target)
        for words, names in targets.items():
            yield f"| {_name(settings[0])} | {', '.join(names)} | {' | '.join(words)} |"


def _name(cell: Cell) -> str:
    parts = [f"`{cell.level}`" if cell.level.startswith("-") else "`--enforce-eager`"]
    if cell.level == Cell.level:
        parts = []
    if not cell.is_async:
        parts.insert(0, "`--no-async-scheduling`")
    if cell.is_adaptive:
        parts.append("`enable_adaptive_verification: true`")
    if cell.backend != "auto":
        parts.append(cell.backend)
    if not cell.has_kernels:
        parts.append("without its precompiled kernels")
    if cell.drafter_backend != "auto":
        parts.append(f"with a drafter on {cell.drafter_backend}")
    return " ".join(parts)


def version() -> str:
    """Return the minor version of the vLLM that is imported, such as 0.33."""
    import vllm  # not before a child has faked its platform

    return ".".join(vllm.__version__.split(".")[:2])


def split_page() -> tuple[str, str, str]:
    """Return the page before, between and after the two marks for this vLLM."""
    begin, end = (MARK.format(word, version()) for word in ("begin", "end"))
    before, _, rest = PAGE.read_text().partition(begin)
    between, found, behind = rest.partition(end)
    assert found, f"{PAGE} has lost its marks for vLLM {version()}"
    return before + begin, between, end + behind


def main() -> None:
    before, _, behind = split_page()
    PAGE.write_text(before + markdown(rows()) + behind)


if __name__ == "__main__":
    main()
