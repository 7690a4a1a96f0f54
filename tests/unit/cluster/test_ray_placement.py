"""Where workers go and what nodes must have: the parts that need no cluster."""

from __future__ import annotations

import pickle
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor import ray_executor_v2

from support.pairs import make_pair
from vllm_dflash import __version__, plugin, seams
from vllm_dflash.cluster import nodes, ray_executor
from vllm_dflash.cluster.cores import Core, share_of_cores
from vllm_dflash.cluster.nodes import Node, NodeError, build_probe, check_nodes, describe_faults
from vllm_dflash.cluster.placement import (
    bundles_of_workers,
    cpus_per_worker,
    threads_of_workers,
)
from vllm_dflash.cluster.ray_executor import CPURayExecutor


@pytest.mark.parametrize(
    ("free", "workers", "expected"),
    [
        ([64, 64], 2, 64),  # a node each
        ([64], 2, 32),
        ([64, 8], 2, 32),  # rather two on the large node than one as slow as the small
        ([64, 40], 2, 40),
        ([64, 64, 10], 4, 32),
        ([3], 2, 1),
        ([1.5, 1], 2, 1),
        ([1], 2, 0),
        ([0.5, 0.5], 1, 0),
        ([], 1, 0),
    ],
)
def test_every_worker_gets_as_many_cpus(free: list[float], workers: int, expected: int) -> None:
    assert cpus_per_worker(free, workers) == expected


def test_workers_get_the_largest_bundles_of_a_group() -> None:
    serve = [{"CPU": 1.0}, {"CPU": 8.0}, {"GPU": 1.0}, {"CPU": 6.5}]
    assert bundles_of_workers(serve, 2) == [1, 3]
    assert threads_of_workers(serve, 2) == 6
    assert bundles_of_workers([{"CPU": 2.0}] * 3, 2) == [0, 1]
    with pytest.raises(
        ValueError, match="has 3 bundles with a CPU, but tensor parallelism needs 4"
    ):
        bundles_of_workers(serve, 4)


# Two sockets of two cores of two threads, numbered as Linux does.
CORES = [Core(cpu, cpu % 4, cpu % 4 // 2) for cpu in range(8)]


@pytest.mark.parametrize(
    ("binding", "rank", "workers", "expected"),
    [
        ("auto", 0, 1, [0, 1, 2, 3]),
        ("auto", 0, 2, [0, 1]),  # a socket each
        ("auto", 1, 2, [2, 3]),
        ("auto", 0, 3, [0]),
        ("auto", 2, 3, [2, 3]),
        ("auto", 1, 5, None),  # more workers than cores
        ("nobind", 1, 2, None),
        ("0-1,4|6,2", 0, 2, [0, 1, 4]),
        ("0-1,4|6,2", 1, 2, [2, 6]),
    ],
)
def test_share_of_cores(binding: str, rank: int, workers: int, expected: list[int] | None) -> None:
    assert share_of_cores(CORES, binding, rank, workers) == expected


def test_a_binding_with_too_few_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="names cores for 1 workers, but 2 workers run"):
        share_of_cores(CORES, "0-3", 1, 2)


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
    assert check_nodes(None, {}) == [GOOD]  # type: ignore[arg-type]


def test_vllms_own_backend_is_refused_on_cpus(tmp_path: Path) -> None:
    """Before any process starts, with the name of ours."""
    pair = make_pair(tmp_path)
    arguments = EngineArgs(
        model=str(pair.target),
        skip_tokenizer_init=True,
        max_model_len=256,
        speculative_config={"method": "dflash", "model": str(pair.drafter)},
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
    )
    with pytest.raises(ValueError, match=rf"to '{plugin.CPU_RAY_EXECUTOR}', or to 'mp'"):
        arguments.create_engine_config()


def test_our_executor_says_where_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = object.__new__(CPURayExecutor)
    monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", "0,1")
    with pytest.raises(ValueError, match="Unset VLLM_RAY_BUNDLE_INDICES"):
        executor._init_executor()
    monkeypatch.setattr(ray_executor.current_platform, "is_cpu", lambda: False)
    with pytest.raises(ValueError, match="--distributed-executor-backend ray"):
        executor._init_executor()


def test_a_core_that_a_worker_may_not_use_is_named() -> None:
    with pytest.raises(ValueError, match=r"VLLM_CPU_OMP_THREADS_BIND='9999' names cores \[9999\]"):
        ray_executor._keep_to_cores("9999", 0, 1)


def test_readers_nap_after_a_message_and_sleep_when_idle() -> None:
    slept: list[int | None] = []
    condition = SimpleNamespace(wait=slept.append, last_read=time.monotonic(), busy_loop_s=60.0)
    queue: Any = SimpleNamespace(_is_local_reader=True, _spin_condition=condition)
    ray_executor._nap_while_waiting(queue)
    before = time.process_time()
    for _ in range(100):
        condition.wait(5)
    assert time.process_time() - before < 0.05
    assert slept == []
    condition.last_read -= 61
    condition.wait(5)
    assert slept == [5]
    ray_executor._nap_while_waiting(
        SimpleNamespace(_is_local_reader=False)
    )  # it reads from a socket


class Executor(ray_executor_v2.RayExecutorV2):
    """As `--distributed-executor-backend ray` has one, before its workers start."""

    def __init__(self, worker_cls: str) -> None:
        self.parallel_config = SimpleNamespace(
            worker_cls=worker_cls,
            placement_group="group",
            ray_runtime_env={"env_vars": {"A": "1"}},
            ray_workers_use_nsight=False,
        )


def test_the_ray_backend_asks_nodes_before_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hook 12, as `register` places it in an engine's process; CUDA's backend is the same class."""
    kind = ray_executor_v2.RayExecutorV2
    monkeypatch.setattr(kind, "_build_runtime_env", kind._build_runtime_env)  # and back
    asked: list[Any] = []

    def refuse(*arguments: Any) -> None:
        asked.append(arguments)
        raise NodeError("node 10.0.0.2")

    monkeypatch.setattr(nodes, "check_nodes", refuse)
    plugin.register()
    plugin.register()
    with pytest.raises(NodeError, match=r"10\.0\.0\.2"):
        Executor(plugin.GPU_WORKER)._build_runtime_env()
    ((group, runtime_env),) = asked
    assert group == "group"
    assert runtime_env["env_vars"]["A"] == "1"
    assert Executor("vllm.v1.worker.gpu_worker.Worker")._build_runtime_env()["env_vars"]
    assert len(asked) == 1  # an engine without DFlash needs nothing of ours


def test_seams_of_ray_hold() -> None:
    seams.check_seams(seams.RAY_CPU)
