"""`vllm-dflash inspect` as a command: what is printed, and where."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT
from support.inspected import check_schema
from support.pairs import drafter_config, save_drafter
from vllm_dflash.tools import cli
from vllm_dflash.tools.inspect import inspection as result

DEMO = ROOT / "models" / "demo"


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_dflash.tools.cli", *arguments]
    # Terminal colours are asked for, and yet no terminal is there.
    environment = {**os.environ, "FORCE_COLOR": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=300
    )


@pytest.fixture(scope="module")
def examples() -> list[list[str]]:
    """Of `--help`, as words behind `vllm-dflash`."""
    text = run_cli("inspect", "--help").stdout.partition("examples:")[2].replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in text.splitlines() if "vllm-dflash inspect" in line]


def test_the_examples_of_help_when_piped(examples: list[list[str]]) -> None:
    """Text without escape codes, and a JSON object with nothing around it."""
    as_text, as_json, _ = examples
    done = run_cli(*as_text)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert not re.search("[┃│]", done.stdout)
    assert done.stdout.rstrip().endswith(
        """--speculative-config '{"method": "dflash", "model": "models/demo/drafter"}'"""
    )
    done = run_cli(*as_json)
    assert done.returncode == 0, done.stderr
    check_schema(json.loads(done.stdout))


def test_json_when_it_cannot_be_read(capfd: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["inspect", "/nowhere", "--target", str(DEMO / "target"), "--json"])
    found = json.loads(capfd.readouterr().out)
    check_schema(found)
    assert code == found["exit_code"] == 2
    assert "does not exist" in found["error"]


def test_what_is_said_and_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_drafter(tmp_path, drafter_config())
    words = ["inspect", str(tmp_path), "--target", str(DEMO / "target")]
    assert cli.main(words) == 1
    said = capsys.readouterr().out
    assert "Does not fit" in said
    assert "num_target_layers is 4 in the drafter, the target has 6 layers" in said
    assert cli.main(["inspect", "/nowhere", *words[2:]]) == 2
    assert "Cannot be read: drafter '/nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv-cache-memory", "lots"], "write 4GiB"),
        (["--kv-cache-memory", "0"], "write 4GiB"),
        (["--tensor-parallel-size", "0"], "no positive whole number"),
    ],
)
def test_bad_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["inspect", "drafter", "--target", "target", *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_every_key_is_documented() -> None:
    documented = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs" / "inspect.md").read_text()))
    kinds = [one for one in vars(result).values() if dataclasses.is_dataclass(one)]
    keys = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert keys - documented == set()
