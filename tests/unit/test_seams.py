"""Every supported vLLM has what vllm_dflash relies on, according to what `make seams` recorded."""

from __future__ import annotations

import ast
import inspect
import json
import pkgutil
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import vllm
from packaging.version import Version

import vllm_dflash
from support import ROOT, vllm_source
from support.vllm_source import RECORDS, all_seams, examine, imported
from vllm_dflash import seams
from vllm_dflash.engine.v2.exchange import CountedOutput
from vllm_dflash.seams import SEAMS, SUPPORTED_VLLM, Seam
from vllm_dflash.vllm_sources import MissingError, Sources

RECORDED = {file.stem: json.loads(file.read_text()) for file in RECORDS.glob("*.json")}
INSTALLED = Version(vllm.__version__).public


@pytest.fixture(scope="module")
def installed() -> Sources:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Sources(Path(spec.origin).parents[1])


def test_what_is_recorded() -> None:
    """The lowest supported version and one of the highest minor, and no unsupported version."""
    assert {"0.32.0", "0.33.0"} <= RECORDED.keys()
    assert all(version in SUPPORTED_VLLM for version in RECORDED)


@pytest.mark.parametrize("version", sorted(RECORDED))
def test_seams_of_each_version(version: str) -> None:
    """If this fails after a change of ours: `make seams VLLM=... ARGS=--record`, for each one."""
    seams = {seam.path: seam for seam in all_seams(version)}
    found = RECORDED[version]["seams"]
    assert seams.keys() == found.keys()
    wrong = [
        f"{path}({found[path]['parameters']})"
        for path, seam in seams.items()
        if not seam.is_as_written(found[path]["parameters"])
    ]
    assert wrong == []


@pytest.mark.parametrize("version", sorted(RECORDED))
def test_outputs_have_all_that_each_version_asks_of_them(version: str) -> None:
    entry = RECORDED[version]["seams"]["vllm.v1.outputs:AsyncModelRunnerOutput"]
    assert "get_output" in entry["abstract"]
    assert {*entry["abstract"]} <= vars(CountedOutput).keys()


@pytest.mark.parametrize("version", sorted(RECORDED))
def test_imports_from_each_version(version: str) -> None:
    found = set(RECORDED[version]["names"])
    assert [sorted(one) for one in imported() if one.isdisjoint(found)] == []


def test_seams_are_made_in_one_place() -> None:
    """Each of them is then checked against every release."""
    made = [
        file.name
        for file in sorted((ROOT / "vllm_dflash").rglob("*.py"))
        if any(
            isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Seam")
            for node in ast.walk(ast.parse(file.read_text()))
        )
    ]
    assert made == ["seams.py"]
    tuples = {name: one for name, one in vars(seams).items() if isinstance(one, tuple)}
    listed = {name for name in tuples if any(tuples[name] is one for one in SEAMS)}
    # SEAMS itself, and the part that two others share.
    assert tuples.keys() - listed == {"SEAMS", "BOTH_WORKERS"}
    assert {*seams.BOTH_WORKERS} <= {*seams.V1_WORKER} & {*seams.V2_WORKER}


def overridden() -> Iterator[tuple[str, set[str]]]:
    """Methods of vLLM that a class of ours replaces: our name, and the names in vLLM."""
    for module in pkgutil.walk_packages(vllm_dflash.__path__, "vllm_dflash."):
        if module.name.endswith("__main__"):
            continue
        for one in vars(import_module(module.name)).values():
            if not (inspect.isclass(one) and one.__module__ == module.name):
                continue
            bases = [base for base in one.__mro__ if base.__module__.startswith("vllm.")]
            for name, value in vars(one).items():
                is_method = callable(value) and (not name.startswith("__") or name == "__init__")
                having = [base for base in bases if hasattr(base, name)]
                is_replaced = any(name in vars(base) for base in having)
                is_made = name == "__init__" and any(map(is_dataclass, having))
                if is_method and is_replaced and not is_made:
                    yield f"{one.__qualname__}.{name}", {f"{b.__name__}.{name}" for b in having}


def test_every_method_of_vllms_that_ours_replace_is_a_seam() -> None:
    held = {seam.path.partition(":")[2] for seam in all_seams("0.32.0") + all_seams("0.33.0")}
    found = dict(overridden())
    assert "DFlashScheduler.update_from_output" in found
    assert [ours for ours, vllms in found.items() if held.isdisjoint(vllms)] == []


@pytest.mark.skipif(INSTALLED not in RECORDED, reason="this vLLM is not recorded")
def test_the_installed_vllm_is_as_recorded(installed: Sources) -> None:
    record, missing = examine(installed, INSTALLED)
    assert missing == []
    expected = RECORDED[INSTALLED]
    assert [
        path for path in record["seams"] if record["seams"][path] != expected["seams"][path]
    ] == []
    assert record == expected


def test_what_breaks_is_named(installed: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = Seam("vllm.v1.core.sched.scheduler:Scheduler.update_from_outputs", "self")
    gone = frozenset({"vllm.envs:VLLM_NOT_ANY_MORE"})
    monkeypatch.setattr(vllm_source, "all_seams", lambda _: [renamed])
    monkeypatch.setattr(vllm_source, "imported", lambda: {gone})
    _, missing = examine(installed, INSTALLED)
    assert missing == [
        "missing    vllm.envs:VLLM_NOT_ANY_MORE",
        f"missing    {renamed.path} (Scheduler has no update_from_outputs)",
    ]


def test_a_choice_of_imports_is_one_need() -> None:
    """For modules that moved: `try` one, `except ImportError` the other."""
    choice = {"vllm.entrypoints.common:cli_args", "vllm.entrypoints.launchers:cli_args"}
    needed = imported()
    assert choice in needed
    assert not any(one < choice for one in needed)
    assert frozenset({"vllm.envs:VLLM_LOG_STATS_INTERVAL"}) in needed


FILES = {
    "vllm/__init__.py": "LATE = {'LLM': '.llm:LLM'}\nfrom .inner import *",
    "vllm/inner/__init__.py": "from ..other import Above as Renamed\nfrom .deep import deeper",
    "vllm/inner/deep.py": "def deeper(a): ...",
    "vllm/other.py": '''
try:
    from outside import Unknown
except ImportError:
    Unknown = object
class Above(Unknown):
    """Says something."""
    field: int = 3
    def inherited(self, a, *b, c=1, **d):
        """Says more."""
        # why
        return a
class Below(Above[int]):
    @classmethod
    def made(cls, x): ...
one = Below()
''',
}


@pytest.fixture
def small(tmp_path: Path) -> Sources:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Sources(tmp_path)


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("vllm.other:Below.inherited", "self a b c d"),
        ("vllm.inner:Renamed.inherited", "self a b c d"),
        ("vllm.inner:deeper", "a"),
        ("vllm.other:one.made", "cls x"),
        ("vllm.other:Below.__dataclass_fields__.field", None),
    ],
)
def test_where_a_name_comes_from(small: Sources, path: str, parameters: str | None) -> None:
    assert vllm_source._entry(*small.find(path))["parameters"] == parameters


@pytest.mark.parametrize(
    "path", ["vllm.other:Below.made_up", "vllm.other:Beside", "vllm.gone:x", "vllm.inner:above"]
)
def test_names_that_are_not_there(small: Sources, path: str) -> None:
    with pytest.raises(MissingError):
        small.find(path)


@pytest.mark.parametrize(
    ("path", "is_there"),
    [
        ("vllm:LLM", True),
        ("vllm:inner", True),
        ("vllm:outer", False),
        ("vllm.other:Below", True),
        ("vllm.outer:Below", False),
    ],
)
def test_what_can_be_imported(small: Sources, path: str, is_there: bool) -> None:
    assert small.has(path) is is_there


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("Says more.", "Says less.", True),
        ("# why", "# why not", True),
        ("return a", "return b", False),
        ("c=1", "c=2", False),
    ],
)
def test_what_counts_as_another_body(tmp_path: Path, old: str, new: str, is_same: bool) -> None:
    def entry(text: str) -> dict[str, Any]:
        (tmp_path / "vllm").mkdir(exist_ok=True)
        (tmp_path / "vllm" / "other.py").write_text(text)
        return vllm_source._entry(*Sources(tmp_path).find("vllm.other:Below.inherited"))

    text = FILES["vllm/other.py"]
    assert (entry(text) == entry(text.replace(old, new))) is is_same


@pytest.mark.parametrize(
    ("parameters", "found", "will_do"),
    [("a b", "self a b", True), ("self a b", "self a b", True), ("a b", "x a b", False)],
)
def test_what_inspect_does_not_show(parameters: str, found: str, will_do: bool) -> None:
    assert Seam("a:b", parameters).is_as_written(found) is will_do
