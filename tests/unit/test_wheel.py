"""What is published: a wheel and a source distribution, built as pip builds them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

import pytest

import vllm_dflash
from support import DEMO, ROOT
from vllm_dflash.tools.demo_files import PARTS

SOURCES = ("pyproject.toml", "README.md", "LICENSE")
TOOLS = "vllm_dflash/tools"
DATA = {"vllm_dflash/py.typed", f"{TOOLS}/prompts.jsonl", f"{TOOLS}/questions.jsonl"}
DATA |= {f"vllm_dflash/seams/{version}.json" for version in ("0.32.0", "0.33.0")}
PAIR = "vllm_dflash/demo_pair/"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with both, built from a copy of their sources."""
    folder = Path(tmp_path_factory.mktemp("built"))
    copy, out = folder / "copy", folder / "dist"
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "vllm_dflash", copy / "vllm_dflash", symlinks=True, ignore=unwanted)
    shutil.copytree(DEMO, copy / "models" / "demo")
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    script = (
        "import sys; from setuptools import build_meta; out = sys.argv[1];"
        " print(build_meta.build_sdist(out), build_meta.build_wheel(out))"
    )
    made = subprocess.run(
        [sys.executable, "-c", script, str(out)], cwd=copy, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    assert "Warning" not in made.stderr  # setuptools warns of files that it may leave out one day
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> ZipFile:
    (file,) = built.glob("*.whl")
    assert file.name == f"vllm_dflash-{vllm_dflash.__version__}-py3-none-any.whl"
    return ZipFile(file)


def metadata(wheel: ZipFile, name: str) -> str:
    """A metadata file of the distribution."""
    (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_a_wheel_has_all_modules_and_data_and_nothing_else(wheel: ZipFile) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "vllm_dflash").rglob("*.py")}
    pair = {name for name in files if name.startswith(PAIR)}
    assert files - pair == modules | DATA
    wanted = {str(file.relative_to(DEMO)) for file in DEMO.rglob("*") if file.is_file()}
    parts = {name for name in wanted if PurePosixPath(name).parts[0] in PARTS}
    assert {name.removeprefix(PAIR) for name in pair} == parts
    weights = "target/model.safetensors"
    assert wheel.read(PAIR + weights) == (DEMO / weights).read_bytes()


def test_a_wheel_says_what_it_is(wheel: ZipFile) -> None:
    about: Message = Parser().parsestr(metadata(wheel, "METADATA"))
    assert (about["Name"], about["Version"]) == ("vllm-dflash", vllm_dflash.__version__)
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_all("Project-URL")
    assert "Typing :: Typed" in about.get_all("Classifier", [])
    entries = metadata(wheel, "entry_points.txt")
    assert "[vllm.general_plugins]\ndflash = vllm_dflash.plugin:register" in entries
    assert "vllm-dflash = vllm_dflash.tools.cli:main" in entries


def test_the_source_distribution_has_what_a_wheel_is_made_of(built: Path, wheel: ZipFile) -> None:
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)  # no links
    names = {member.name.partition("/")[2] for member in members}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} <= names
    assert not any(name.startswith("tests/") for name in names)
