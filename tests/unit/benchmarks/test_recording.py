"""README's recording: real commands as they printed, and the picture drawn from it."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import recording
from recording import PAUSE, PROMPT, READ, Event, Screen, film

HEADER: dict[str, object] = {"width": 10, "height": 3, "title": "a <machine>"}


def printed(*outputs: str, every: float = 1.0) -> list[Event]:
    return [(every * number, "o", output) for number, output in enumerate(outputs)]


def seen(events: list[Event], at: float, rows: int = 3) -> list[str]:
    """Return what a viewer sees at this second of the film."""
    one = film(events, 10, rows)
    top = [top for start, top in one.tops if start <= at][-1]
    lines = [""] * rows
    for shown in one.shown:
        is_there = shown.start <= at and (shown.end is None or at < shown.end)
        if is_there and 0 <= shown.row - top < rows:
            lines[shown.row - top] = "".join(character for character, _ in shown.line)
    return lines


def texts(picture: str) -> list[str]:
    root = ElementTree.fromstring(picture)
    return ["".join(part.itertext()) for part in root.iter() if part.tag.endswith("text")]


def test_the_picture_is_of_the_recording_that_is_kept() -> None:
    """If this fails, `python benchmarks/recording.py` draws it again."""
    picture = recording.PICTURE.read_text()
    header, events = recording.read_cast(recording.CAST)
    assert recording.draw(header, events) == picture
    assert len(picture) < 300_000
    everything = "\n".join(texts(picture))
    for command in recording.COMMANDS:
        assert f"$ {command}"[: recording.WIDTH] in everything
    assert "vllm-dflash" in "".join(data for _, _, data in events)


def test_commands_are_recorded_as_they_print(tmp_path: Path) -> None:
    green = "\x1b[32mgreen ✓\x1b[0m"
    commands = [f"printf 'it'\\''s '; sleep 0.3; echo '{green}'", "sleep 100 &", "tty"]
    started = time.perf_counter()
    header, events = recording.record(commands, tmp_path)
    assert time.perf_counter() - started < 50  # background processes end as well
    everything = "".join(data for _, _, data in events)
    assert f"{PROMPT}{commands[0]}\x1b[0m\r\nit's {green}\r\n" in everything
    assert "/dev/" in everything.splitlines()[-1]  # a terminal
    before, after = (
        next(at for at, _, data in events if text in data) for text in ("it's ", f"{green}\r\n")
    )
    assert 0.25 < after - before < 5
    assert (header["version"], header["width"], header["height"]) == (2, 88, 32)


def test_a_command_that_fails_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        recording.record(["false", "echo never"], tmp_path)


def test_lines_are_written_over_and_scroll_away() -> None:
    events = printed("one\r\ntwo 1", "\r\x1b[2Ktwo 2", "\r\nthree\r\n", "four")
    assert seen(events, 0) == ["one", "two 1", ""]
    assert seen(events, PAUSE) == ["one", "two 2", ""]
    assert seen(events, 2 * PAUSE) == ["two 2", "three", ""]
    assert seen(events, 99) == ["two 2", "three", "four"]


def test_only_pauses_are_shorter_than_they_were() -> None:
    quick = [(0.0, "o", "a"), (0.06, "o", "b"), (0.12, "o", "c"), (60.0, "o", "d")]
    assert [at for at, _ in recording.played(quick)] == [0, 0.06, 0.12, 0.12 + PAUSE]
    together = [(0.0, "o", "a"), (0.01, "o", "b"), (0.02, "o", "c")]
    assert list(recording.played(together)) == [(0, "abc")]
    command = [(0.0, "o", f"{PROMPT}a"), (0.1, "o", "a"), (0.2, "o", f"{PROMPT}b")]
    assert [at for at, _ in recording.played(command)] == [0, 0.1, 0.1 + READ]


def test_what_a_terminal_does_with_what_it_is_sent() -> None:
    screen = Screen(5)
    for piece in ("\x1b[?25l\x1b", "[1;3", "2mab\x1b[0mcdefg\r\nxyz\r-\x1b[K", "\r\nw\x1b[1A!"):
        screen.feed(piece)
    lines = ["".join(text for text, _ in line) for line in screen.lines]
    assert lines == ["abcde", "fg", "-!", "w"]
    (_, style), (_, second), (_, none), *_ = screen.lines[0]
    assert style == second
    assert style.bold
    assert style.color is not None
    assert style.color.number == 2
    assert not none


@pytest.mark.parametrize("sequence", ["\x1b[2J", "\x1b[5;5H", "\x1b]0;title\x07", "\x07", "\t"])
def test_what_would_be_drawn_wrongly_is_refused(sequence: str) -> None:
    with pytest.raises(ValueError, match="not drawn"):
        Screen(80).feed(sequence)


def test_the_picture_ends_where_nothing_moves_and_says_what_was_shortened() -> None:
    picture = recording.draw(
        HEADER, printed("\x1b[1;32ma  <b>\x1b[0m 12%", "\r\x1b[2Kdone\r\n2\r\n3\r\n4", every=0.1)
    )
    about, *lines = texts(picture)
    assert about == "a <machine>. Pauses last 0.1 s at most: the clocks tell how long they were"
    assert lines == ["a", "<b>", "12%", "done", "2", "3", "4"]
    hidden = re.search(r'<g class="(t\d+) x"><text x="0" y="14" .*? class="b (c0)">a<', picture)
    assert hidden is not None
    assert f"@keyframes {hidden[1]}{{0.000%{{visibility:visible}}1.639%{{visibility:hidden}}}}" in (
        picture
    )
    assert ".top{transform:translateY(-18px);" in picture
    assert "prefers-reduced-motion" in picture
