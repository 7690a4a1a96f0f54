"""Runs the servers on the same prompts, one after the other; shows speeds and drafted tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from operator import eq
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_dflash.tools.bench.sides import OURS, PLAIN, Side
from vllm_dflash.tools.completions import (
    complete,
    counts,
    decode,
    encode,
    make_requests,
    steps,
)
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.server import Server
from vllm_dflash.tools.verify.gate import drafting_between

TEXTS = {1: (1, 4), 8: (8, 24)}
"""Number of texts of each pass, by how many run at a time. Only the last pass counts: kernels are
prepared and costs learned when a batch size first occurs."""
SHOWN = 2
"""Texts that are shown step by step, as soon as our engine is up."""
MOST_IN_A_STEP = 64
"""Tokens; longer than any drafter's block."""
INCOMPLETE = "\ufffd"
BAR = 16
ACCEPTED, OWN = "bold green", "bold"
ANSWER = "\n\n"
"""Between a question and its answer."""
PROMPT_SHOWN = 160
"""Characters of a prompt's end to show, and to use if the text is only continued."""
NAMES = {PLAIN: ("plain decoding", "dim"), OURS: ("vllm-dflash", "green")}
"""Names for newcomers, and styles, by side."""


class Step(NamedTuple):
    """New text of one step of the target."""

    drafted: str
    own: str
    """Text of the target's own token."""
    length: int
    """Number of its tokens."""


@dataclass(frozen=True)
class Written:
    """What one engine wrote at one concurrency."""

    texts: list[list[int]]
    tokens_per_second: float
    acceptance_length: float | None


@dataclass
class Demonstration:
    """All results of a demonstration."""

    dtype: str = ""
    levels: dict[int, dict[str, Written]] = field(
        default_factory=lambda: {one: {} for one in TEXTS}
    )
    """Results by concurrency and by name of side."""

    @property
    def all_identical(self) -> bool:
        """Whether every side wrote what plain decoding wrote."""
        return all(
            written.texts == level[PLAIN].texts
            for level in self.levels.values()
            for written in level.values()
        )


def demonstrate(
    start: Callable[[Side], Server],
    sides: list[Side],
    prompts: list[str],
    tokens: int,
    progress: Progress,
    show: Callable[[str, Iterator[Step]], None],
    questions: list[str] | None,
) -> Demonstration:
    """Generate texts of up to `tokens` tokens on every side, one server after the other.

    `sides` must include plain decoding and ours. `start` starts a side's server. Ours runs first,
    so that users see DFlash without waiting for the others: `show` gets the prompts of its first
    texts, and their steps as they come. `questions` replace the prompts, and go through the chat
    template, if the target has one.

    Raises:
        ValueError: an engine refused its arguments.
        EngineDied: an engine died.
    """
    found = Demonstration()
    template: dict[str, Any] | None = None
    # Ours first: only it checks that the pair fits.
    for number, side in enumerate(sorted(sides, key=lambda side: side.name != OURS), 1):
        with start(side) as server:
            name = f"engine {number} of {len(sides)} ({side.name})"
            with progress.stage(f"{name}: starting"):
                facts = server.wait()
            found.dtype = facts["dtype"]
            if side.name == OURS and questions and facts["has_chat_template"]:
                prompts, template = questions, {}
            encoded = encode(server, prompts[: max(sum(TEXTS.values(), ()))], template)
            if side.name == OURS:
                for prompt, one in zip(prompts[:SHOWN], encoded, strict=False):
                    shown = write_by_step(server, one, tokens)
                    show(prompt + ANSWER * (template is not None), shown)
            # Prompts repeat, so that as many texts as a pass says are written at a time.
            passes = [
                (count, [*islice(cycle(encoded), texts)])
                for count in TEXTS
                for texts in TEXTS[count]
            ]
            total, done = sum(len(texts) for _, texts in passes), 0
            with progress.stage(f"{name}: writing", total, "texts") as tell:
                for count, texts in passes:
                    requests = make_requests(texts, tokens, count, facts)
                    before, began = counts(server), time.perf_counter()
                    written = [one.tokens for one in complete(server, requests, count)]
                    rate = sum(map(len, written)) / (time.perf_counter() - began)
                    _, length = drafting_between(before, counts(server))
                    found.levels[count][side.name] = Written(written, rate, length)
                    done += len(texts)
                    tell(done)
    return found


def write_by_step(server: Server, prompt: Sequence[int], tokens: int) -> Iterator[Step]:
    """Yield the steps of a text as they come.

    The last token of a step is the target's own (the bonus token); those before it are accepted
    drafts. A character made of several tokens is the text of the last of them. Steps are never cut,
    so there may be a few more than `tokens` tokens. A token that ends the text is not shown.
    """
    written: list[int] = []
    shown = ""

    def show(new: Sequence[int]) -> str:
        nonlocal shown
        written.extend(new)
        before = len(shown)
        shown = decode(server, written).rstrip(INCOMPLETE) if new else shown
        return shown[before:]

    (request,) = make_requests([prompt], tokens + MOST_IN_A_STEP, 1, server.facts)
    for *drafts, last in steps(server, request):
        is_end = last in server.facts["stop_tokens"]
        yield Step(show(drafts), "" if is_end else show([last]), len(drafts) + 1)
        if len(written) >= tokens:
            return


def show_text(prompt: str, text: Iterable[Step], console: Console) -> None:
    """Print the text that follows a prompt as it comes, marking accepted drafts."""
    colours = bool(console.color_system) and not console.no_color
    mark = "{}" if colours else "«{}»"
    accepted, own = (
        Text(mark.format("accepted drafts"), ACCEPTED),
        Text("the target's own tokens", OWN),
    )
    line = Text("─" * 72, "dim")
    console.print(Text.assemble("\nWho wrote what: ", accepted, ", ", own), line, sep="\n")
    # The terminal wraps lines.
    write = partial(console.print, end="", soft_wrap=True)
    write(Text(prompt[-PROMPT_SHOWN:], "dim"))
    count = tokens = 0
    for step in text:
        write(Text(mark.format(step.drafted) if step.drafted else "", ACCEPTED))
        write(Text(step.own, OWN))
        count, tokens = count + 1, tokens + step.length
    about = (
        f"{tokens} tokens in {count} steps of the target:"
        f" {tokens - count} were drafted, and accepted by it"
    )
    console.print("", Text(about, "italic"), line, sep="\n")


def show_speeds(found: Demonstration, console: Console) -> None:
    """Print how fast each side was, and how many texts were identical."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("tokens/s")
    for head in ("", "against\nplain", "acceptance\nlength", "identical\ntexts"):
        table.add_column(head, justify="right")
    for count, level in found.levels.items():
        table.add_row(f"\n{count} request{'s'[: count > 1]} at a time", style="bold")
        plain = level[PLAIN]
        fastest = max(written.tokens_per_second for written in level.values())
        for side, (name, style) in NAMES.items():
            written = level[side]
            rate, length = written.tokens_per_second, written.acceptance_length
            same = sum(map(eq, written.texts, plain.texts))
            table.add_row(
                Text(f"  {name}"),
                Text("█" * max(1, round(BAR * rate / fastest))),
                f"{rate:.1f}",
                "" if side == PLAIN else f"{rate / plain.tokens_per_second:.2f}x",
                "" if length is None else f"{length:.2f}",
                "" if side == PLAIN else f"{same} of {len(written.texts)}",
                style=style,
            )
    console.print(table)
    notes = (
        f"\n{found.dtype}, greedy. Acceptance length: tokens that a request gets from a"
        "\nstep of the target that verifies drafts, the target's own token included."
    )
    if not found.all_identical and found.dtype != "float32":
        notes += (
            f"\nTexts differ where rounding to {found.dtype} decides between two likely tokens:"
            "\n`vllm-dflash verify` judges each such place. In float32 there are none."
        )
    console.print(notes, soft_wrap=True, highlight=False, markup=False)
