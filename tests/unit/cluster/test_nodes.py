"""What nodes must have, and what is said if they lack it."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from vllm_dflash import __version__
from vllm_dflash.cluster import nodes
from vllm_dflash.cluster.nodes import (
    Node,
    NodeError,
    ask_nodes,
    build_probe,
    check_nodes,
    nodes_unsupported_reason,
)

BUILD = "another build of vllm-dflash, sources"


def test_the_probe_travels_without_our_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    sent = ray.cloudpickle.dumps(build_probe(["/", "/no/such.so"]))
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm_dflash"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    answer = pickle.loads(sent)()
    assert answer["problem"].startswith("ModuleNotFoundError: ")
    assert "vllm_dflash" in answer["problem"]
    assert answer["preload_unsupported_reason"] == "has no /no/such.so"
    assert answer["python"] == sys.executable


@pytest.mark.parametrize(
    ("files", "own", "fault"),
    [
        (["/"], "", None),
        (["/"], "/its/own.so", "was started with one already"),
        ([], "/its/own.so", None),  # the engine has none
    ],
)
def test_whether_a_node_takes_the_engines_preload(
    monkeypatch: pytest.MonkeyPatch, files: list[str], own: str, fault: str | None
) -> None:
    monkeypatch.setenv("LD_PRELOAD", own)
    assert build_probe(files)().get("preload_unsupported_reason") == fault


OWN = {"vllm-dflash": __version__, BUILD: "b1", "vLLM": "0.32.0"}
GOOD = Node("10.0.0.1", "aa", "one", "/usr/bin/python3", OWN)


BAD = Node("10.0.0.2", "bb", "two", "/opt/python", OWN)


@pytest.mark.parametrize(
    ("installed", "problem", "fault"),
    [
        (
            {},
            "ModuleNotFoundError: vllm_dflash",
            "vllm-dflash cannot run there: ModuleNotFoundError: vllm_dflash",
        ),
        (
            {**OWN, "vllm-dflash": "0.0.9", BUILD: "b0"},
            "",
            f"it has vllm-dflash 0.0.9, the engine has {__version__}",
        ),
        (
            {**OWN, BUILD: "b2"},
            "",
            "it has another build of vllm-dflash, sources b2, the engine has b1",
        ),
        ({**OWN, "vLLM": "0.31.0"}, "", "it has vLLM 0.31.0, the engine has 0.32.0"),
    ],
)
def test_faults_name_the_node_and_the_command(
    installed: dict[str, str], problem: str, fault: str
) -> None:
    node = dataclasses.replace(BAD, installed=installed, problem=problem)
    message = nodes_unsupported_reason([GOOD, node], OWN, "cuda")
    assert message is not None
    first, *lines, last = message.splitlines()
    assert first.startswith("1 of 2 nodes of the Ray cluster cannot run workers of vllm-dflash")
    assert lines == [
        f"  node 10.0.0.2 (two, id bb): {fault}",
        "    on that node, in a checkout of the engine's vllm-dflash version, run:"
        ' pip --python /opt/python install ".[cuda]"',
    ]
    assert last == "Then restart the engine; Ray can stay up."


def test_good_nodes_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nodes_unsupported_reason([GOOD, GOOD], OWN, "cpu") is None
    same = Node("10.0.0.1", "aa", **build_probe()())
    monkeypatch.setattr(nodes, "ask_nodes", lambda *_: [same])
    assert check_nodes(None, {}) == [same]
    other = dataclasses.replace(same, installed={**same.installed, BUILD: "b0"})
    monkeypatch.setattr(nodes, "ask_nodes", lambda *_: [same, other])
    with pytest.raises(NodeError, match=r"another build .* sources b0, the engine"):
        check_nodes(None, {})


def test_a_build_is_known_by_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other files in the folder do not matter, nor does its path."""

    def build(folder: str, sources: dict[str, str]) -> str:
        package = tmp_path / folder
        for name, text in sources.items():
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            (package / name).write_text(text)
        module = SimpleNamespace(__version__="1.0", __file__=str(package / "__init__.py"))
        monkeypatch.setitem(sys.modules, "vllm_dflash", module)
        return str(build_probe()()["installed"][BUILD])

    sources = {"__init__.py": "", "engine/worker.py": "a = 1"}
    first = build("first", sources)
    assert build("second", {**sources, "engine/__pycache__/worker.cpython-311.pyc": "x"}) == first
    assert build("third", {**sources, "engine/worker.py": "a = 2"}) != first
    assert build("fourth", {"__init__.py": "", "engine/other.py": "a = 1"}) != first
    assert build("fifth", {"__init__.py": "a = 1", "engine/worker.py": ""}) != first


def test_nodes_are_asked_in_the_environment_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment may contain the package."""
    first, other = "aa" * 28, "bb" * 28
    asked: list[dict[str, Any]] = []

    class Probe:
        def options(self, **options: Any) -> Probe:
            asked.append(options)
            return self

        def remote(self) -> str:
            return asked[-1]["scheduling_strategy"].node_id

    monkeypatch.setattr(ray, "remote", lambda _: Probe())
    monkeypatch.setattr(ray, "get", lambda reference, timeout: {"host": f"host of {reference}"})
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": first, "NodeManagerAddress": "10.0.0.1"}])
    table = {"bundles_to_node_id": {0: first, 1: other, 2: first}}
    monkeypatch.setattr(ray.util, "placement_group_table", lambda _: table)
    group: Any = None
    answers = ask_nodes(group, {"working_dir": "there"})
    found = [(node.node_id, node.ip, node.host) for node in answers]
    assert found == [
        (first, "10.0.0.1", f"host of {first}"),
        (other, "unknown address", f"host of {other}"),
    ]
    assert [one["runtime_env"] for one in asked] == [{"working_dir": "there"}] * 2
