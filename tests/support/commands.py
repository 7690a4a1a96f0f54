"""Commands as `--help` shows them."""

from __future__ import annotations

import shlex

import pytest

from vllm_dflash.tools import cli


def examples_of(command: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Return the examples in a command's `--help`, as words after `vllm-dflash`."""
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = capsys.readouterr().out.partition("examples:")[2].replace("\\\n", " ")
    lines = [shlex.split(line) for line in text.splitlines()]
    return [words[1:] for words in lines if words[:2] == ["vllm-dflash", command]]
