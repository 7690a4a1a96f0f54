"""Arrows that import contracts cannot see, and what belongs to every mended bug of vLLM.

The contracts are in pyproject.toml; `make check` runs them.
"""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

from support import ROOT

PACKAGE = ROOT / "vllm_dflash"
MODULES = sorted(PACKAGE.rglob("*.py"))
FIXES = {file.name: file for file in PACKAGE.glob("engine/**/*_fixes/[!_]*.py")}


def imported(file: Path) -> set[str]:
    """Modules that a file imports, including those inside functions and for types."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    plain = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    inside = {f"{node.module}.{name.name}" for node in froms for name in node.names}
    return plain | inside | {str(node.module) for node in froms}


def is_module(vllm: Path, name: str) -> bool:
    """Whether a dotted name is a module of vLLM, and not something inside one."""
    return (vllm.parent / f"{name.replace('.', '/')}.py").exists()


def test_v2_needs_nothing_that_leaves_vllm_with_v1() -> None:
    """For workers, sampling and speculation it imports only modules that vLLM's own V2 imports."""
    vllm = Path(find_spec("vllm").origin).parent  # type: ignore[union-attr,arg-type]
    folders = [vllm / "v1" / "worker" / "gpu", vllm / "v1" / "core"]
    stay = set().union(*(imported(file) for each in folders for file in each.rglob("*.py")))
    stay |= {f"vllm.v1.worker.{name}" for name in ("gpu_worker", "worker_base", "cpu_worker")}
    rooms = [PACKAGE / "engine" / "v1", PACKAGE / "tools"]
    ours = [module for module in MODULES if not any(map(module.is_relative_to, rooms))]
    named = set().union(*map(imported, ours))
    at_risk = ("vllm.v1.worker.", "vllm.v1.sample.", "vllm.v1.spec_decode.")
    found = {name for name in named if name.startswith(at_risk) and is_module(vllm, name)}
    assert len(found) > 10
    assert {name for name in found - stay if not name.startswith("vllm.v1.worker.gpu.")} == set()


def test_the_emulated_gpu_knows_no_plugin() -> None:
    """Nor does it know our tests' support code, so others can take the folder."""
    files = [*(ROOT / "tests" / "emulated").glob("*.py")]
    found = {name.split(".")[0] for file in files for name in imported(file)}
    assert {"emulated", "torch", "vllm"} <= found
    assert found & {"vllm_dflash", "support", "tests", "gpu", "faults"} == set()


def test_the_page_of_the_architecture_names_every_file_that_runs_in_an_engine() -> None:
    """The commands' files are not on it; fixes of vLLM have a page of their own."""
    page = (ROOT / "docs" / "engineering" / "architecture.md").read_text()
    files = [file for file in MODULES if not file.is_relative_to(PACKAGE / "tools")]
    names = {file.name for file in files if not file.name.startswith("__")} - set(FIXES)
    assert len(names) > 80
    assert {name for name in names if name not in page} == set()


def test_every_file_that_a_page_names_exists() -> None:
    """In the repository, or in vLLM."""
    vllm = Path(find_spec("vllm").origin).parent  # type: ignore[union-attr,arg-type]
    ours = (ROOT / name for name in ("benchmarks", "examples", "scripts", "tests"))
    known = [f"/{file}" for each in (PACKAGE, vllm, *ours) for file in each.rglob("*.py")]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = re.compile(r"`([\w./]*\w+\.py)\b")
    found = {(page.name, name) for page in pages for name in named.findall(page.read_text())}
    assert len(found) > 200
    ends = {path[at:] for path in known for at, sign in enumerate(path) if sign == "/"}
    assert {(page, name) for page, name in found if f"/{name}" not in ends} == set()


def test_every_mended_bug_has_an_issue_for_vllm() -> None:
    page = (ROOT / "docs" / "engineering" / "upstream.md").read_text()
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    assert [name for name in sections if name.endswith(".py")] == sorted(FIXES)
    for name, text in sections.items():
        parts = ["### [Bug]", "**Your current environment:** vLLM 0.32.0", "**Describe the bug:**"]
        parts += [
            "**How to reproduce:**",
            "```python",
            "**Expected:**",
            "Found:",
            "**Suggested fix:**",
        ]
        assert [part for part in parts if part not in text] == []
        assert name not in FIXES or "docs/engineering/upstream.md" in FIXES[name].read_text()
        assert f"[{name}](#{name.replace('.', '').replace(' ', '-')})" in page


def names_of(file: Path) -> set[str]:
    """A module's name with its dots, and those of its functions and classes."""
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    inside = {getattr(node, "name", None) for node in ast.parse(file.read_text()).body} - {None}
    return {module, *(f"{module}.{name}" for name in inside)}


def test_what_is_named_by_string_exists() -> None:
    """The contracts cannot see these arrows."""
    dotted = re.compile(r'"(vllm_dflash(?:[.]\w+)+(?::\w+)?)"')
    named = {name for file in MODULES for name in dotted.findall(file.read_text())}
    assert named
    assert {name.replace(":", ".") for name in named} - set().union(
        *map(names_of, MODULES)
    ) == set()
