"""Which vLLM versions our engines run in, and that all others run vLLM's own DFlash."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm
from packaging.version import Version

from support.log_lines import log_lines
from support.pairs import Pair
from vllm_dflash import compatibility
from vllm_dflash.compatibility import RECORDS, SUPPORTED_VLLM, differences, first_difference
from vllm_dflash.config.engine_options import ADDITIONAL_CONFIG_KEY, CPU_WORKER_V1, MOST_FREE_DRAFTS

RECORDED = {file.stem: json.loads(file.read_text()) for file in RECORDS.glob("*.json")}
INSTALLED = RECORDED[Version(vllm.__version__).public]
PARTS = ("front_end", "engine", "worker", "v1", "v2", "candidates")
OURS: dict[str, Any] = {"draft_length": "fixed", "free_drafts": "off"}


def is_ours(config: Any) -> bool:
    return config.parallel_config.worker_cls == CPU_WORKER_V1


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What a vLLM is compared with, in a process that finds no difference."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(compatibility, "first_difference", lambda *asked: calls.append(asked))
    return calls


def said_of(pair: Pair, version: str) -> list[str]:
    """Log lines of an engine of ours that name the version."""
    with log_lines() as lines:
        assert is_ours(pair.start())
    return [line for line in lines if version in line]


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.0+cpu", "0.33.0+cu130"])
def test_releases_that_tests_run_with_are_not_compared(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, compared: list[Any], version: str
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    assert not said_of(pair, version)
    assert compared == []


@pytest.mark.parametrize(
    ("version", "release", "is_said"),
    [
        ("0.32.1", "0.32.0", False),
        ("0.33.2", "0.33.0", False),
        ("0.33.0rc2", "0.33.0", True),
        ("0.33.1rc1.dev12+gabc", "0.33.0", True),
        ("0.34.0rc1", "0.33.0", True),
        ("0.34.0", "0.33.0", True),
        ("1.0", "0.33.0", True),
        ("dev", "0.33.0", True),
        ("0.1.dev1+gabc.d20261101", "0.33.0", True),
    ],
)
def test_others_with_all_we_rely_on_are_ours(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    compared: list[Any],
    version: str,
    release: str,
    is_said: bool,
) -> None:
    """A warning says so, unless it is a patch of a release that tests run with."""
    monkeypatch.setattr("vllm.__version__", version)
    said = said_of(pair, f"vLLM {version}")
    assert compared == [(release, ("front_end", "engine", "worker", "v1"))]
    assert len(said) == is_said
    assert all(line.startswith("WARNING") and "never tested" in line for line in said)
    assert all(str(SUPPORTED_VLLM) in line for line in said)


@pytest.mark.parametrize("version", ["0.31.0", "0.31.9+cpu", "0.11.2"])
def test_older_ones_run_vllms_own(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    with log_lines() as lines:
        config = pair.start(OURS)
    assert not is_ours(config)
    assert config.speculative_config.num_speculative_tokens == 7 != MOST_FREE_DRAFTS
    assert ADDITIONAL_CONFIG_KEY not in config.additional_config
    (line,) = [line for line in lines if "stays out" in line]
    assert line.startswith("WARNING")
    assert f"this is vLLM {version}" in line
    assert "install a newer vLLM" in line
    assert all(repr(option) in line for option in OURS)


@pytest.mark.parametrize("required", [False, None, True, "true"])
def test_a_vllm_that_differs_runs_its_own_before_anything_starts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, required: Any
) -> None:
    """If the user requires ours, the start stops with an error that names the reason."""
    monkeypatch.setattr("vllm.__version__", "0.34.0")
    gone = "it has no vllm.v1:gone"
    monkeypatch.setattr(compatibility, "first_difference", lambda *_: gone)
    if required:
        with log_lines() as lines, pytest.raises(ValueError, match=f"cannot run .*{gone}"):
            pair.start({"require": required})
        assert [line for line in lines if line.startswith("ERROR")]
        return
    with log_lines() as lines:
        assert not is_ours(pair.start({"require": required, **OURS}))
    assert len([line for line in lines if gone in line and "stays out" in line]) == 1


def test_the_process_that_compares_finds_what_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is asked once for all engines of a process, and its last line is the difference."""
    release = Version(vllm.__version__).public
    assert first_difference(release, ("engine", "v1")) is None
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho a traceback >&2\necho ImportError: gone >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    assert first_difference(release, ("engine", "v1")) is None
    assert first_difference(release, ("engine",)) == "ImportError: gone"


def test_each_difference_from_a_record_is_named() -> None:
    assert list(differences(INSTALLED, PARTS)) == []
    changed = copy.deepcopy(INSTALLED)
    expected = []
    for part in PARTS:
        for path, entry in changed["seams"][part].items():
            if entry["parameters"] is not None:
                entry["parameters"] += " more"
                expected.append(path)
        module = next(iter(changed["seams"][part])).partition(":")[0]
        changed["seams"][part] |= {f"{module}:Gone.gone": {"parameters": None}}
        changed["names"].setdefault(part, []).append("vllm.gone:f")
        expected += [f"{module}:Gone.gone", "vllm.gone:f"]
    found = list(differences(changed, PARTS))
    named = [re.sub(r"^it has no | takes .*|, because .*", "", line) for line in found]
    assert sorted(named) == sorted(expected)
    assert len(expected) > 120


def test_what_cannot_even_be_asked_is_vllms(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> None:
        raise ImportError("cannot import name 'HAS_TRITON'")

    monkeypatch.setattr("vllm_dflash.config.engine_options.runner_here", ask)
    with log_lines() as lines:
        assert not is_ours(pair.start())
    assert "does not know vLLM" in "".join(lines)
    assert "HAS_TRITON" in "".join(lines)


def test_each_row_beside_native_033_names_tests_that_there_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
    rows = page.partition("## Native 0.33 and ours")[2].partition("\n## ")[0].split("\n|")[3:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`((?:unit|engine)/[\w/]+\.py)`", row)
        assert named or "| none |" in row, row
        assert all((Path(__file__).parents[1] / name).is_file() for name in named), row
