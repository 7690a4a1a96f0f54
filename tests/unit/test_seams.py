"""Every supported vLLM has what vllm_dflash relies on, according to what `make seams` recorded."""

from __future__ import annotations

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
from support import seam_record
from support.seam_record import RECORDS, entries, examine, imported
from support.seam_table import SEAMS, paths_of
from support.vllm_sources import Sources
from vllm_dflash.compatibility import SUPPORTED_VLLM
from vllm_dflash.engine.v2.exchange import ReportedOutput

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
def test_seams_and_imports_of_each_version(version: str) -> None:
    """If this fails after a change of ours: `make seams VLLM=... ARGS=--record`, for each one."""
    record = RECORDED[version]
    assert {part: sorted(record["seams"][part]) for part in SEAMS} == {
        part: paths_of(part) for part in SEAMS
    }
    for part, needed in imported().items():
        missing = [sorted(one) for one in needed if one.isdisjoint(record["names"][part])]
        assert missing == [], part


@pytest.mark.parametrize("version", sorted(RECORDED))
def test_outputs_have_all_that_each_version_asks_of_them(version: str) -> None:
    entry = entries(RECORDED[version])["vllm.v1.outputs:AsyncModelRunnerOutput"]
    assert "get_output" in entry["abstract"]
    assert {*entry["abstract"]} <= vars(ReportedOutput).keys()


def overrides() -> Iterator[tuple[Any, set[str]]]:
    """Methods of ours that replace one of vLLM's, and its names there."""
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
                    yield value, {f"{b.__name__}.{name}" for b in having}


def test_every_method_of_vllms_that_ours_replace_is_a_seam() -> None:
    held = {path.partition(":")[2] for part in SEAMS for path in paths_of(part)}
    found = {method.__qualname__: names for method, names in overrides()}
    assert "V1Scheduler.update_from_output" in found
    assert [ours for ours, vllms in found.items() if held.isdisjoint(vllms)] == []


@pytest.mark.parametrize("version", sorted(RECORDED))
def test_methods_of_ours_take_what_each_version_gives(version: str) -> None:
    """Unless they take anything."""
    taken = {
        (path.partition(":")[2], entry["parameters"])
        for path, entry in entries(RECORDED[version]).items()
    }
    different, count = [], 0
    for method, names in overrides():
        ours = inspect.signature(method).parameters
        kinds = {one.kind for one in ours.values()}
        is_open = kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        if is_open or method.__name__ in ("__init__", "forward"):
            continue
        count += 1
        if taken.isdisjoint((name, " ".join(ours)) for name in names):
            different.append(method.__qualname__)
    assert different == []
    assert count > 40


@pytest.mark.skipif(INSTALLED not in RECORDED, reason="this vLLM is not recorded")
def test_the_installed_vllm_is_as_recorded(installed: Sources) -> None:
    record, missing = examine(installed)
    assert missing == []
    assert record == RECORDED[INSTALLED]


def test_what_breaks_is_named(installed: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = "vllm.v1.core.sched.scheduler:Scheduler.update_from_outputs"
    gone = frozenset({"vllm.envs:VLLM_NOT_ANY_MORE"})
    monkeypatch.setattr(seam_record, "SEAMS", {"engine": ""})
    monkeypatch.setattr(seam_record, "paths_of", lambda _: [renamed])
    monkeypatch.setattr(seam_record, "imported", lambda: {"engine": {gone}})
    _, missing = examine(installed)
    assert missing == [
        "missing    vllm.envs:VLLM_NOT_ANY_MORE",
        f"missing    {renamed} (Scheduler has no update_from_outputs)",
    ]
