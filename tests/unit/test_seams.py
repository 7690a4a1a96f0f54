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

import pytest
import vllm
from packaging.version import Version

import vllm_dflash
from support import ROOT, vllm_source
from support.vllm_source import RECORDS, all_seams, examine, imported
from vllm_dflash import seams
from vllm_dflash.engine.v2.exchange import ReportedOutput
from vllm_dflash.seams import SEAMS, SUPPORTED_VLLM, Seam
from vllm_dflash.vllm_sources import Sources

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
        if not seam.accepts(found[path]["parameters"])
    ]
    assert wrong == []


@pytest.mark.parametrize("version", sorted(RECORDED))
def test_outputs_have_all_that_each_version_asks_of_them(version: str) -> None:
    entry = RECORDED[version]["seams"]["vllm.v1.outputs:AsyncModelRunnerOutput"]
    assert "get_output" in entry["abstract"]
    assert {*entry["abstract"]} <= vars(ReportedOutput).keys()


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
    assert "V1Scheduler.update_from_output" in found
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
