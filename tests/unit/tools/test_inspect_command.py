"""`vllm-dflash inspect` as a command: what is printed, and where."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from support import DEMO, ROOT
from support.commands import examples_of
from support.inspected import check_schema
from support.pairs import drafter_config, save_drafter
from vllm_dflash.tools import cli
from vllm_dflash.tools.inspect import inspection as result
from vllm_dflash.tools.tables import Table


def test_the_example_of_help_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text has no escape codes even if colours are asked for: there is no terminal."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main(examples_of("inspect", capsys)[0]) == 0
    printed = capsys.readouterr().out
    assert not re.search("[\x1b┃│]", printed)
    assert printed.rstrip().endswith(
        """--speculative-config '{"method": "dflash", "model": "models/demo/drafter"}'"""
    )


def test_what_is_said_and_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_drafter(tmp_path, drafter_config())
    target = ["--target", str(DEMO / "target")]
    assert cli.main(["inspect", str(tmp_path), *target]) == 1
    said = capsys.readouterr().out
    assert "Does not fit" in said
    assert "num_target_layers is 4 in the drafter, the target has 6 layers" in said
    assert cli.main(["inspect", "/nowhere", *target]) == 2
    assert "Cannot be read: drafter '/nowhere'" in capsys.readouterr().err
    assert cli.main(["inspect", "/nowhere", *target, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    check_schema(found)
    assert (found["exit_code"], "does not exist" in found["error"]) == (2, True)


def test_every_key_is_documented() -> None:
    documented = set(re.findall(r"`([a-z0-9_]+)`", (ROOT / "docs" / "inspect.md").read_text()))
    known = [one for one in vars(result).values() if dataclasses.is_dataclass(one)]
    kinds = [one for one in known if one is not Table]
    keys = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert keys - documented == set()
