"""A usage error ends any command with exit code 2 and a message that names it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import ROOT
from support.engines import DRAFTER, TARGET
from vllm_dflash.tools import cli
from vllm_dflash.tools.arguments import not_negative, positive, share, whole
from vllm_dflash.tools.console import COULD_NOT_RUN, INTERRUPTED
from vllm_dflash.tools.prompts import read_prompts
from vllm_dflash.tools.server import EngineDied

PAIR = [str(DRAFTER), "--target", str(TARGET)]
SWAPPED = [str(TARGET), "--target", str(DRAFTER)]
SPECULATIVE = ["--target", str(TARGET), "--speculative-config", '{"method": "dflash"}']
MISSING = ["--prompts", "nowhere.jsonl"]
NO_FILE = "prompts file 'nowhere.jsonl' does not exist"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verify", *SPECULATIVE, *MISSING], NO_FILE),
        (["inspect", "models/demo/draftr", *PAIR[1:]], "no such folder, and not a repository name"),
        (["inspect", PAIR[0], "--target", "a/b/c"], "target 'a/b/c': no such folder, and not a"),
        (["inspect", *SWAPPED], "are the two swapped?"),
        (["inspect", *PAIR, "--jsn"], "unrecognized arguments: --jsn"),
        (["inspect", *PAIR, "--", "--dtype", "half"], "unrecognized arguments: -- --dtype half"),
        (["verify", *SPECULATIVE[:3], "{"], "not JSON"),
        (["verify", *SPECULATIVE, "--tie", "nan"], "nan is not a non-negative number"),
        (["bench", "--rounds", "0"], "0 is not a positive whole number"),
    ],
    ids=lambda value: " ".join(value)[:24] if isinstance(value, list) else "",
)
def test_usage_errors_end_with_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main(words)
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    assert code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("error", "code", "is_bug"),
    [
        (ValueError("the pair does not fit"), COULD_NOT_RUN, False),
        (EngineDied(ROOT / "README.md"), COULD_NOT_RUN, False),
        (KeyError("a bug"), COULD_NOT_RUN, True),
        (KeyboardInterrupt("interrupted"), INTERRUPTED, False),
    ],
)
def test_what_ends_a_command_is_said(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, is_bug: bool
) -> None:
    """Only a bug comes with a traceback."""

    def run() -> int:
        raise error

    assert cli.run_command("it", run) == code
    out, err = capsys.readouterr()
    assert not out
    assert "it: " in err
    assert str(error.args[0]) in err
    assert ("Traceback" in err) == is_bug


@pytest.mark.parametrize(
    ("written", "prompts"),
    [
        (b'{"prompt": "a\\nb"}\n\n  indented\nplain "text"\n[1]\n', ["a\nb", "  indented"]),
        (b"\xef\xbb\xbfone\r\n\xef\xbb\xbftwo\r\n", ["one", "\ufefftwo"]),
        (b'\xef\xbb\xbf{"prompt": "one"}\r\n2\r\n', ["one", "2"]),
        (b'  {"prompt": "one"}\n[{"a": 1}]\n', ["one", '[{"a": 1}]']),
    ],
)
def test_prompts_of_both_kinds(tmp_path: Path, written: bytes, prompts: list[str]) -> None:
    """A byte-order mark is no part of them."""
    file = tmp_path / "prompts"
    file.write_bytes(written)
    assert read_prompts(file)[:2] == read_prompts(file, 2) == prompts


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b" \n", "prompts file '{}' holds no prompts"),
        (b'[\n{"prompt": "one"},\n{"prompt": "two"}\n]\n', "prompts file '{}' is one JSON array"),
        (b'first\n{"text": "x"}', "{}, line 2: expected "),
        (b'first\n{"prompt"', "{}, line 2: expected "),
        (b'first\n{"prompt": 1}', "{}, line 2: expected "),
        ("grün\n".encode() + "grün\n".encode("latin-1"), "{}, line 2: it is not UTF-8"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, written: bytes, message: str) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(written)
    with pytest.raises(ValueError, match=f"^{message.format(file)}"):
        read_prompts(file)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (positive, {"1": 1, "12": 12}, ["0", "-1", "1.5", "nan", "some", ""]),
        (not_negative, {"0": 0.0, "1e-3": 0.001, "2": 2.0}, ["-0.1", "nan", "inf", "some", ""]),
        (whole, {"0": 0, "7": 7}, ["-1", "1.5", "nan", "some", ""]),
        (share, {"0.5": 0.5, "1": 1.0}, ["0", "1.1", "-1", "nan", "some", ""]),
    ],
)
def test_numbers(kind: Callable[[str], Any], good: dict[str, float], bad: list[str]) -> None:
    assert {text: kind(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=f"^{text} is not a "):
            kind(text)
