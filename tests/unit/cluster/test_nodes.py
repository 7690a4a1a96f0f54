"""What nodes must have, and what is said where they lack it."""

from __future__ import annotations

import pickle
import sys

import pytest
import ray

from vllm_dflash import __version__
from vllm_dflash.cluster import nodes
from vllm_dflash.cluster.nodes import Node, build_probe, check_nodes, describe_faults


def test_the_probe_travels_without_our_package(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = ray.cloudpickle.dumps(build_probe(["/", "/no/such.so"]))
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm_dflash"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    answer = pickle.loads(sent)()
    assert answer["problem"].startswith("ModuleNotFoundError: ")
    assert "vllm_dflash" in answer["problem"]
    assert answer["is_import"]
    assert answer["missing_files"] == ("/no/such.so",)
    assert answer["python"] == sys.executable


def test_the_probe_reads_both_versions() -> None:
    import vllm

    answer = build_probe()()
    assert (answer["package"], answer["vllm"]) == (__version__, vllm.__version__)
    assert "problem" not in answer


GOOD = Node("10.0.0.1", "aa", "one", "/usr/bin/python3", __version__, "0.32.0")


@pytest.mark.parametrize(
    ("node", "fault"),
    [
        (
            Node(
                *("10.0.0.2", "bb", "two", "/opt/python"),
                problem="ModuleNotFoundError: vllm_dflash",
                is_import=True,
            ),
            "vllm-dflash cannot run there: ModuleNotFoundError: vllm_dflash",
        ),
        (
            Node("10.0.0.2", "bb", "two", "/opt/python", "0.0.9", "0.32.0"),
            f"it has vllm-dflash 0.0.9, the engine {__version__}",
        ),
        (
            Node("10.0.0.2", "bb", "two", "/opt/python", __version__, "0.31.0"),
            "it has vLLM 0.31.0, the engine 0.32.0",
        ),
    ],
)
def test_faults_name_the_node_and_the_command(node: Node, fault: str) -> None:
    message = describe_faults([GOOD, node], "0.32.0", "cuda")
    assert message is not None
    first, *lines, last = message.splitlines()
    assert first.startswith("1 of 2 nodes of the Ray cluster cannot run workers of vllm-dflash")
    assert lines == [
        f"  node 10.0.0.2 (two, id bb): {fault}",
        f"    there, in a checkout of vllm-dflash {__version__}:"
        ' pip --python /opt/python install ".[cuda]"',
    ]
    assert last == "Then start the engine again; Ray itself can stay up."


def test_what_no_package_would_mend_gets_no_such_advice() -> None:
    silent = Node("10.0.0.2", "bb", problem="GetTimeoutError: no answer")
    message = describe_faults([silent], "0.32.0", "cpu") or ""
    assert "node 10.0.0.2" in message
    assert "GetTimeoutError: no answer" in message
    assert "install" not in message


def test_good_nodes_are_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_faults([GOOD, GOOD], "0.32.0", "cpu") is None
    monkeypatch.setattr(nodes, "ask_nodes", lambda *_: [GOOD])
    assert check_nodes(None, {}) == [GOOD]
