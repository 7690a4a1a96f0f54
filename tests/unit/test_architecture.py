"""The rooms of the package: who may import whom, and that a stranger finds what he looks for.

The contracts themselves are in pyproject.toml. Each is broken here once, in a copy of the package.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from support import ROOT

PACKAGE = ROOT / "vllm_dflash"
MODULES = sorted(PACKAGE.rglob("*.py"))
LINES = 320
"""The most that a module may have."""
FIXES = {file.name: file for file in PACKAGE.glob("engine/**/*_fixes/[!_]*.py")}


def lint_imports(folder: Path) -> tuple[int, str]:
    """Exit code and words of import-linter, for the package in this folder."""
    linter = Path(sys.executable).with_name("lint-imports")
    command: list[str | Path] = [
        linter,
        "--no-cache",
        "--no-logo",
        "--config",
        ROOT / "pyproject.toml",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the package, for faults to be planted in."""
    shutil.copytree(PACKAGE, tmp_path / "vllm_dflash", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_contracts_are_kept() -> None:
    code, words = lint_imports(ROOT)
    assert code == 0, words


ARROWS = "Arrows go down: a room imports from rooms below its own"


@pytest.mark.parametrize(
    ("file", "line", "contract", "found"),
    [
        ("planning", "import torch", "planning is pure", "-> torch"),
        ("planning", "def f():\n    import vllm.config", "planning is pure", "-> vllm"),
        ("planning", "import vllm_dflash.checkpoint.read", ARROWS, "-> vllm_dflash.checkpoint"),
        ("checkpoint", "import vllm_dflash.engine", ARROWS, "-> vllm_dflash.engine"),
        ("checkpoint", "import vllm", "checkpoint reads files without vLLM", "-> vllm"),
        ("model", "import vllm_dflash.plugin", ARROWS, "-> vllm_dflash.plugin"),
        ("config", "import vllm_dflash.cluster", ARROWS, "-> vllm_dflash.cluster"),
        ("config", "def f():\n    import vllm_dflash.plugin", ARROWS, "-> vllm_dflash.plugin"),
        ("engine", "import vllm_dflash.tools", ARROWS, "-> vllm_dflash.tools"),
        ("engine", "import vllm_dflash.cluster", ARROWS, "-> vllm_dflash.cluster"),
        ("engine", "import ray.util", "Only cluster needs Ray", "-> ray"),
        ("engine", "import rich", "Only tools write to a terminal or draw", "-> rich"),
        ("cluster", "import vllm_dflash.tools", ARROWS, "-> vllm_dflash.tools"),
    ],
)
def test_a_wrong_import_is_found(
    copy: Path, file: str, line: str, contract: str, found: str
) -> None:
    (copy / "vllm_dflash" / file / "astray.py").write_text(f"{line}\n")
    code, words = lint_imports(copy)
    assert code == 1, words
    assert f"{contract} BROKEN" in words.replace(": it runs without vLLM and PyTorch", "")
    assert f"vllm_dflash.{file}.astray {found}" in words


def test_the_plugin_is_heavy_for_nobody(copy: Path) -> None:
    with (copy / "vllm_dflash" / "plugin.py").open("a") as file:
        file.write("\ndef f():\n    import vllm_dflash.engine\n")
    code, words = lint_imports(copy)
    assert code == 1
    assert f"{ARROWS} BROKEN" in words
    assert "vllm_dflash.plugin -> vllm_dflash.engine" in words


def test_a_cycle_inside_a_room_is_found(copy: Path) -> None:
    room = copy / "vllm_dflash" / "engine" / "v1"
    (room / "hen.py").write_text("import vllm_dflash.engine.v1.egg\n")
    (room / "egg.py").write_text("import vllm_dflash.engine.v1.hen\n")
    code, words = lint_imports(copy)
    assert code == 1
    assert "No cycles, between rooms or inside one BROKEN" in words
    assert "No cycles are allowed in vllm_dflash.engine.v1" in words


def test_a_new_room_needs_a_place(copy: Path) -> None:
    (copy / "vllm_dflash" / "attic.py").touch()
    code, words = lint_imports(copy)
    assert code == 1
    assert f"{ARROWS} BROKEN" in words
    assert "attic" in words


def imported(file: Path) -> set[str]:
    """Modules that a file imports, inside its functions and for types as well."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    plain = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    inside = {f"{node.module}.{name.name}" for node in froms for name in node.names}
    return plain | inside | {str(node.module) for node in froms}


def is_module(vllm: Path, name: str) -> bool:
    """Whether a dotted name is a module of vLLM's, and not something inside one."""
    return (vllm.parent / f"{name.replace('.', '/')}.py").exists()


def test_v2_needs_nothing_that_leaves_vllm_with_v1() -> None:
    """For workers, sampling and speculation it imports the modules that vLLM's own V2 does."""
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


def test_no_two_modules_bear_one_name() -> None:
    names = Counter(module.name for module in MODULES if module.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_files_of_tests_bear_one_name() -> None:
    """pytest would not collect the second one, where both folders are run."""
    names = Counter(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_emulated_gpu_knows_no_plugin() -> None:
    """Nor its tests' support: a stranger could take the folder."""
    files = [*(ROOT / "tests" / "emulated").glob("*.py")]
    found = {name.split(".")[0] for file in files for name in imported(file)}
    assert {"emulated", "torch", "vllm"} <= found
    assert found & {"vllm_dflash", "support", "tests", "gpu", "faults"} == set()


def test_files_of_the_emulated_gpu_are_short() -> None:
    files = [
        f for f in (ROOT / "tests" / "emulated").rglob("*") if f.suffix in (".py", ".h", ".cpp")
    ]
    assert len(files) > 20
    lines = {file.name: len(file.read_text().splitlines()) for file in files}
    assert {name: count for name, count in lines.items() if count > LINES} == {}


def test_modules_are_short() -> None:
    lines = {module: len(module.read_text().splitlines()) for module in MODULES}
    assert {module.name: count for module, count in lines.items() if count > LINES} == {
        "seams.py": lines[PACKAGE / "seams.py"]  # a list, most of it
    }


def test_docstrings_begin_with_what_they_describe() -> None:
    folders = ("vllm_dflash", "benchmarks", "examples", "scripts", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    inverted = re.compile(r'^ *"""(Of|Whose) ', re.MULTILINE)
    assert {file.name for file in files if inverted.search(file.read_text())} == set()


def test_names_say_what_is_inside() -> None:
    parts = {part for module in MODULES for part in module.relative_to(PACKAGE).parts}
    words = {word for part in parts for word in part.removesuffix(".py").split("_")}
    nothing = {"util", "utils", "helper", "helpers", "manager", "common", "misc", "base"}
    assert words & nothing == set()


def test_every_mended_bug_is_on_the_page_of_hooks() -> None:
    page = ast.get_docstring(ast.parse((PACKAGE / "plugin.py").read_text())) or ""
    assert len(FIXES) > 10
    assert {name for name in FIXES if name not in page} == set()


def test_every_mended_bug_has_an_issue_for_vllm() -> None:
    page = (ROOT / "docs" / "engineering" / "upstream.md").read_text()
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    assert [*sections] == sorted(FIXES)
    for name, text in sections.items():
        parts = ["Title: **[Bug]", "Version: 0.32.0", "What is wrong:", "To reproduce", "```python"]
        parts += ["Expected:", "Found:", "Suggested"]
        assert [part for part in parts if part not in text] == []
        assert "docs/engineering/upstream.md" in FIXES[name].read_text()
        assert f"[{name}](#{name.replace('.', '')})" in page


def names_of(file: Path) -> set[str]:
    """A module's name with its dots, and those of its functions and classes."""
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    inside = {getattr(node, "name", None) for node in ast.parse(file.read_text()).body} - {None}
    return {module, *(f"{module}.{name}" for name in inside)}


def test_what_is_named_by_string_exists() -> None:
    """Those are arrows that the contracts cannot see."""
    dotted = re.compile(r'"(vllm_dflash(?:[.]\w+)+(?::\w+)?)"')
    named = {name for file in MODULES for name in dotted.findall(file.read_text())}
    assert named
    assert {name.replace(":", ".") for name in named} - set().union(
        *map(names_of, MODULES)
    ) == set()


def test_the_modules_that_the_page_names_exist() -> None:
    """With their folder, or in one that stands in the text before them."""
    page = (ROOT / "docs" / "engineering" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)\b", page))
    assert len(named) > 30
    files = [f"/{file.relative_to(ROOT).as_posix()}" for file in ROOT.glob("[tv]*/**/*.py")]
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


def test_one_page_says_how_long_planning_compiles() -> None:
    """Others point there: they had three numbers."""
    duration = re.compile(r"[Cc]ompil\w+ (takes |for )(about )?[\w.]+ ([a-z]+ )?(second|minute)")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), PACKAGE / "planning/compiled.py"]
    saying = {page.name for page in pages if duration.search(" ".join(page.read_text().split()))}
    assert saying == {"benchmarks.md"}  # where it is of another program, too
    assert "## How long planning compiles" in (ROOT / "docs" / "benchmarks.md").read_text()
