"""Make the picture at the top of README, a recording of real commands: `make recording`.

    scripts/run.sh python benchmarks/recording.py --record

runs COMMANDS in a terminal of its own, keeps what they printed and when as docs/demo.cast (the
format of asciinema, version 2), and draws docs/demo.svg from it. Without --record, it draws what is
kept. Only the clock is changed: a pause is played for PAUSE seconds at most, and READ seconds pass
before a command. tests/unit/benchmarks/test_recording.py compares the picture with the recording.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import pty
import re
import subprocess
import termios
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.style import Style
from rich.terminal_theme import MONOKAI

from vllm_dflash.tools.bench.bench_record import cpu_name

ROOT = Path(__file__).parents[1]
CAST, PICTURE = ROOT / "docs" / "demo.cast", ROOT / "docs" / "demo.svg"
COMMANDS = (
    "make --silent demo",
    "examples/serve.sh > out/server.log 2>&1 &",
    "curl --silent --retry 300 --retry-connrefused --retry-delay 1 http://127.0.0.1:8000/health",
    "grep --only-matching 'vllm-dflash .* is active: drafter [^,]*' out/server.log",
    "python examples/client.py",
)
WIDTH, ROWS = 88, 32
PROMPT = "\x1b[1m$ "
PAUSE, READ, HOLD, FRAME = 0.1, 3.0, 6.0, 0.04
"""Seconds: longest pause, before a command, at the end, and between outputs shown as one."""

Event = tuple[float, str, str]
"""Seconds since the start, "o", what was printed."""
Line = tuple[tuple[str, Style], ...]
"""Characters, from the first column on."""


def record(commands: Sequence[str], folder: Path) -> tuple[dict[str, object], list[Event]]:
    """Run bash commands in a terminal. Returns the recording's header, and what they printed.

    What they leave in the background is ended with the last command.

    Raises:
        subprocess.CalledProcessError: a command failed.
    """
    lines = ["set -e", "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"]
    for command in commands:
        shown = command.replace("'", "'\\''")
        lines += [f"printf '\\e[1m$ %s\\e[0m\\n' '{shown}'", command]
    unset = ("COLORTERM", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    terminal, inside = pty.openpty()
    termios.tcsetwinsize(inside, (ROWS, WIDTH))
    shell = subprocess.Popen(
        ["bash", "-c", "\n".join(lines)],
        cwd=folder,
        env=environment | {"TERM": "xterm"},
        stdin=inside,
        stdout=inside,
        stderr=inside,
    )
    os.close(inside)
    started, decode = time.perf_counter(), codecs.getincrementaldecoder("utf-8")().decode
    events: list[Event] = []
    while data := _read(terminal):
        events.append((round(time.perf_counter() - started, 3), "o", decode(data)))
    os.close(terminal)
    if code := shell.wait():
        raise subprocess.CalledProcessError(code, list(commands))
    about = {"version": 2, "width": WIDTH, "height": ROWS, "timestamp": int(time.time())}
    return about | {"title": f"{os.cpu_count()} CPU cores, {cpu_name()}"}, events


def _read(terminal: int) -> bytes:
    """Read what was printed next; nothing once no process is left to print."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


def played(events: Iterable[Event]) -> Iterator[tuple[float, str]]:
    """Yield when each output is played. Outputs that come together are one."""
    frames: list[tuple[float, str]] = []
    clock = before = 0.0
    for at, _, data in events:
        is_next_command = PROMPT in data and before > 0
        clock += READ if is_next_command else min(at - before, PAUSE)
        before = at
        if frames and clock - frames[-1][0] < FRAME:
            frames[-1] = (frames[-1][0], frames[-1][1] + data)
        else:
            frames.append((clock, data))
    yield from frames


class Screen:
    """A terminal that keeps all lines. It knows what rich and shells write, and refuses the rest.

    Raises:
        ValueError: from `feed`: a control sequence that would be drawn wrongly.
    """

    TOKEN = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|[^\x1b]")
    CUT_OFF = re.compile(r"\x1b(\[[?\d;]*)?$")

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines: list[list[tuple[str, Style]]] = [[]]
        self.row = self.column = 0
        self._decoder, self._rest = AnsiDecoder(), ""

    def feed(self, data: str) -> None:
        """Print data on the screen."""
        data = self._rest + data
        cut_off = self.CUT_OFF.search(data)
        self._rest = cut_off[0] if cut_off else ""
        data = data.removesuffix(self._rest)
        place = 0
        while place < len(data):
            token = self.TOKEN.match(data, place)
            if token is None:
                raise ValueError(f"not drawn: {data[place : place + 8]!r}")
            place = token.end()
            self._control(token) if token[2] else self._write(token[0])

    def _control(self, token: re.Match[str]) -> None:
        line, what = self.lines[self.row], token[1] + token[2]
        if token[2] == "m":
            self._decoder.decode_line(token[0])
        elif what == "2K":
            line.clear()
        elif what in ("K", "0K"):
            del line[self.column :]
        elif token[2] == "A":
            self.row = max(0, self.row - int(token[1] or 1))
        elif what not in ("?25l", "?25h"):  # the cursor, which is not drawn
            raise ValueError(f"not drawn: {token[0]!r}")

    def _write(self, character: str) -> None:
        if character == "\r":
            self.column = 0
            return
        if character == "\n" or self.column == self.width:
            self.row += 1
            if self.row == len(self.lines):
                self.lines.append([])
            if character == "\n":
                return
            self.column = 0
        if not character.isprintable():
            raise ValueError(f"not drawn: {character!r}")
        line, style = self.lines[self.row], self._decoder.style
        line += [(" ", Style.null())] * (self.column + 1 - len(line))
        line[self.column] = (character, style)
        self.column += 1


@dataclass
class Shown:
    """A line in a row, counted from the recording's first, and when it appears and disappears."""

    row: int
    line: Line
    start: float
    end: float | None = None


@dataclass
class Film:
    """Everything that is seen: lines, and the first row on the screen over time."""

    shown: list[Shown] = field(default_factory=list)
    tops: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    seconds: float = HOLD


def film(events: Iterable[Event], width: int, rows: int) -> Film:
    """Compute what is on the screen, and when."""
    found, screen = Film(), Screen(width)
    now: dict[int, Shown] = {}
    for at, data in played(events):
        screen.feed(data)
        found.seconds = at + HOLD
        for row, cells in enumerate(screen.lines):
            line = tuple(cells)
            if row in now and now[row].line == line:
                continue
            if row in now:
                now[row].end = at
            now[row] = Shown(row, line, at)
            if line:
                found.shown.append(now[row])
        top = max(0, len(screen.lines) - rows)
        if top != found.tops[-1][1]:
            found.tops.append((at, top))
    return found


CELL, HEIGHT, EDGE, BAR = 8.4, 18, 16, 34
"""Pixels: width and height of a character, the margin around the text, and the title bar."""


def draw(header: dict[str, object], events: Iterable[Event]) -> str:
    """Draw the picture as SVG, animated by CSS. Without animation, it shows the recording's end."""
    width, rows, title = int(str(header["width"])), int(str(header["height"])), header["title"]
    one = film(events, width, rows)

    def steps(states: list[tuple[float, str]]) -> str:
        return "".join(f"{100 * at / one.seconds:.3f}%{{{state}}}" for at, state in states)

    colours: dict[str, str] = {}
    times: dict[tuple[float, float | None], str] = {}
    body = []
    for shown in one.shown:
        if not (texts := _texts(shown, colours)):
            continue
        name = times.setdefault((shown.start, shown.end), f"t{len(times)}")
        body.append(f'<g class="{name}{"" if shown.end is None else " x"}">{texts}</g>')
    rules = [f".{name}{{fill:{colour}}}" for colour, name in colours.items()]
    for (start, end), name in times.items():
        states = [(start, "visibility:visible")]
        if start > 0:
            states.insert(0, (0.0, "visibility:hidden"))
        if end is not None:
            states.append((end, "visibility:hidden"))
        rules.append(f"@keyframes {name}{{{steps(states)}}}.{name}{{animation-name:{name}}}")
    moves = [(at, f"transform:translateY({-top * HEIGHT}px)") for at, top in one.tops]
    rules.append(f"@keyframes top{{{steps(moves)}}}.top{{{moves[-1][1]};animation-name:top}}")
    wide, high = width * CELL + 2 * EDGE, rows * HEIGHT + BAR + EDGE
    fonts = "ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace"
    about = f"{title}. Pauses last {PAUSE:g} s at most: the clocks tell how long they were"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high}" role="img">
<title>{escape(about)}</title>
<style>
text{{font:14px {fonts};fill:{MONOKAI.foreground_color.hex}}}
.b{{font-weight:bold}}.d{{fill-opacity:.6}}.i{{font-style:italic}}.x{{visibility:hidden}}
g{{animation:{one.seconds:.3f}s step-end infinite}}
{chr(10).join(rules)}
@media (prefers-reduced-motion:reduce){{g{{animation:none!important}}}}
</style>
<rect width="{wide:g}" height="{high}" rx="8" fill="#161616" stroke="#555"/>
<text x="{EDGE}" y="22" class="d">{escape(about)}</text>
<svg x="{EDGE}" y="{BAR}" width="{width * CELL:g}" height="{rows * HEIGHT}"><g class="top">
{chr(10).join(body)}
</g></svg>
</svg>
"""


def _texts(shown: Shown, colours: dict[str, str]) -> str:
    """Draw a line, with a text element for each stretch of one style; a new colour gets a class."""
    texts, column = [], 0
    for style, cells in groupby(shown.line, key=lambda cell: cell[1]):
        together = "".join(character for character, _ in cells)
        names = [name for name in ("bold", "dim", "italic") if getattr(style, name)]
        classes = [name[0] for name in names]
        if style.color is not None and not style.color.is_default:
            colour = style.color.get_truecolor(MONOKAI).hex
            classes.append(colours.setdefault(colour, f"c{len(colours)}"))
        marked = f' class="{" ".join(classes)}"' if classes else ""
        # Runs of two or more spaces are left out: not every viewer keeps them.
        for words in re.finditer(r"\S+( \S+)*", together):
            place = f'x="{(column + words.start()) * CELL:g}" y="{shown.row * HEIGHT + 14}"'
            length = f'textLength="{len(words[0]) * CELL:g}"'
            texts.append(f"<text {place} {length}{marked}>{escape(words[0], False)}</text>")
        column += len(together)
    return "".join(texts)


def read_cast(file: Path) -> tuple[dict[str, object], list[Event]]:
    """Read a recording: its header, and what was printed."""
    header, *events = map(json.loads, file.read_text().splitlines())
    return header, [tuple(event) for event in events]


def main() -> None:
    """Record if asked to, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="run the commands: minutes")
    if parser.parse_args().record:
        header, events = record(COMMANDS, ROOT)
        lines = [json.dumps(one, ensure_ascii=False) for one in (header, *events)]
        CAST.write_text("\n".join(lines) + "\n")
    PICTURE.write_text(draw(*read_cast(CAST)))


if __name__ == "__main__":
    main()
