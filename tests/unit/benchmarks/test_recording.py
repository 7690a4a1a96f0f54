"""README's recording: real commands as they printed, and the picture drawn from it."""

from __future__ import annotations

import time
from pathlib import Path
from xml.etree import ElementTree

import recording
from recording import PROMPT


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
