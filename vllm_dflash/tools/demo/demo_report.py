"""A demonstration on a terminal, or in a file."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_dflash.tools.bench.sides import PLAIN, Side
from vllm_dflash.tools.demo.demonstration import Demonstration

BAR = 16
ACCEPTED, OWN = "bold green", "bold"
PROMPT_SHOWN = 160
NAMES = {"plain": "plain decoding", "ours": "vllm-dflash"}
STYLES = {"plain": "dim", "native": "blue", "ours": "green"}


def show(found: Demonstration, console: Console) -> None:
    """Some text by who wrote it, then the speeds."""
    for part in (*_texts(found, console), _speeds(found), *_notes(found)):
        console.print(part, soft_wrap=isinstance(part, str), highlight=False, markup=False)


def _texts(found: Demonstration, console: Console) -> Iterator[RenderableType]:
    colours = bool(console.color_system) and not console.no_color
    accepted = Text("accepted drafts" if colours else "«accepted drafts»", ACCEPTED)
    own = Text("the target's own tokens", OWN)
    yield Text.assemble("\nWho wrote what: ", accepted, ", ", own)
    for prompt, steps in found.by_step:
        text = Text().append(prompt[-PROMPT_SHOWN:], "dim")
        for *drafted, bonus in steps:
            words = "".join(drafted)
            text.append(words if colours or not words else f"«{words}»", ACCEPTED)
            text.append(bonus, OWN)
        yield Text("─" * 72, "dim")
        yield text
        tokens = sum(map(len, steps))
        yield Text(
            f"{tokens} tokens in {len(steps)} steps of the target:"
            f" {tokens - len(steps)} were drafted, and accepted by it",
            "italic",
        )
    yield Text("─" * 72, "dim")


def _speeds(found: Demonstration) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("tokens/s")
    for head in ("", "against\nplain", "acceptance\nlength", "identical\ntexts"):
        table.add_column(head, justify="right")
    for count, level in found.levels.items():
        table.add_row(f"\n{count} request{'s'[: count > 1]} at a time", style="bold")
        plain = level[PLAIN].tokens_per_second
        fastest = max(written.tokens_per_second for written in level.values())
        for side in found.sides:
            written = level[side.name]
            rate, length = written.tokens_per_second, written.acceptance_length
            same = f"{found.identical(count, side)} of {len(written.texts)}"
            table.add_row(
                Text(f"  {_name(side)}"),
                Text("█" * max(1, round(BAR * rate / fastest))),
                f"{rate:.1f}",
                "" if side.name == PLAIN else f"{rate / plain:.2f}x",
                "" if length is None else f"{length:.2f}",
                "" if side.name == PLAIN else same,
                style=STYLES[side.kind],
            )
    return table


def _name(side: Side) -> str:
    """What a newcomer would call it."""
    return NAMES.get(side.kind, f"vLLM's DFlash, {side.draft_length}")


def _notes(found: Demonstration) -> Iterator[str]:
    yield (
        f"\n{found.dtype}, greedy. Acceptance length: tokens that a request gets from a"
        "\nstep of the target that verifies drafts, the target's own token included."
    )
    if not found.all_identical and found.dtype != "float32":
        yield (
            f"Texts differ where rounding to {found.dtype} decides between two likely tokens:\n"
            "`vllm-dflash verify` judges each such place. In float32 there are none."
        )
