"""Which Ray executor an engine gets, and what it does before its workers start."""

from __future__ import annotations

import importlib
import pickle
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor import Executor, ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

from support.log_lines import log_lines
from support.pairs import Pair
from vllm_dflash import compatibility, plugin
from vllm_dflash.cluster import ray_executor, ray_worker
from vllm_dflash.cluster.nodes import NodeError
from vllm_dflash.cluster.placement import BINDING
from vllm_dflash.cluster.ray_executor import CPURayExecutor, DFlashRayExecutor
from vllm_dflash.cluster.ray_worker import (
    SECONDS_OF_A_NAP,
    CPURayWorkerProc,
    keep_to_cores,
    nap_while_waiting,
)
from vllm_dflash.config import engine_options

PLACES = [(0, "aa", "10.0.0.1"), (1, "bb", "10.0.0.2")]


@pytest.fixture
def on_cuda(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Callable[..., VllmConfig]:
    """Build the config of an engine with two ranks on Ray, as if this machine had GPUs."""

    def build(speculative: dict[str, Any] | None) -> VllmConfig:
        return pair.start(
            speculative_config=speculative,
            tensor_parallel_size=2,
            distributed_executor_backend="ray",
        )

    # Import the modules of models while the platform is still the CPU.
    pair.start()
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
    return build


def dflash(pair: Pair) -> dict[str, Any]:
    return {"method": "dflash", "model": str(pair.drafter), "draft_length": "fixed"}


class WorkerStartedError(Exception):
    """Raised instead of starting a worker's process."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[VllmConfig]:
    """Record the configs that workers start with. vLLM's own `_init_executor` runs."""
    configs: list[VllmConfig] = []

    class Remote:
        def __init__(self, worker: type) -> None: ...

        def options(self, **_: Any) -> Remote:
            return self

        def remote(self, *, vllm_config: VllmConfig, **_: Any) -> None:
            configs.append(pickle.loads(pickle.dumps(vllm_config)))  # as Ray sends it
            raise WorkerStartedError

    context = SimpleNamespace(get_node_id=lambda: "aa")
    address = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    ray = SimpleNamespace(remote=Remote, util=address, get_runtime_context=lambda: context)
    queue = SimpleNamespace(export_handle=lambda: None, shutdown=lambda: None)
    monkeypatch.setattr(ray_executor_v2, "ray", ray)
    monkeypatch.setattr(ray_executor_v2, "MessageQueue", lambda *_, **__: queue)
    monkeypatch.setattr(
        ray_executor_v2, "PlacementGroupSchedulingStrategy", lambda **arguments: arguments
    )
    monkeypatch.setattr(ray_executor_v2, "initialize_ray_cluster", lambda *_, **__: None)
    monkeypatch.setattr(ray_executor_v2, "get_bundles_sorted_by_node", lambda _: PLACES)
    monkeypatch.setattr(RayExecutorV2, "_get_actor_resource_kwargs", staticmethod(dict))
    return configs


def test_the_ray_backend_asks_nodes_before_workers_start(
    on_cuda: Callable[..., VllmConfig],
    pair: Pair,
    started: list[VllmConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers see the backend that the user wrote; the engine's front end sees Ray."""
    asked: list[Any] = []

    def refuse(*arguments: Any) -> None:
        asked.append(arguments)
        raise NodeError("node 10.0.0.2")

    monkeypatch.setattr(ray_executor, "check_nodes", refuse)
    config = on_cuda(dflash(pair))
    assert config.parallel_config.use_ray
    config = pickle.loads(pickle.dumps(config))  # as the engine's process gets it
    assert config.parallel_config.use_ray
    config.parallel_config.placement_group = "group"
    config.parallel_config.ray_runtime_env = {"env_vars": {"A": "1"}}
    executor = Executor.get_class(config)
    assert executor is DFlashRayExecutor
    with pytest.raises(NodeError, match=r"10\.0\.0\.2"):
        executor(config)
    ((group, runtime_env),) = asked
    assert (group, runtime_env["env_vars"]["A"]) == ("group", "1")
    assert not started
    monkeypatch.setattr(ray_executor, "check_nodes", lambda *_: [])
    with pytest.raises(WorkerStartedError):
        executor(config)
    (of_worker,) = started
    assert of_worker.parallel_config.distributed_executor_backend == "ray"
    speculative = of_worker.speculative_config
    assert speculative is not None
    for parallel in (speculative.target_parallel_config, speculative.draft_parallel_config):
        assert parallel.distributed_executor_backend == "ray"


def test_without_ray_the_error_names_what_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is `ray` on CUDA, and the path of our own executor on CPUs."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, ray_executor.__name__)
    with pytest.raises(ImportError, match=r"--distributed-executor-backend .*pip install 'ray>="):
        importlib.import_module(ray_executor.__name__)


def test_vllms_older_executor_stays_where_it_was_chosen(
    on_cuda: Callable[..., VllmConfig], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 has neither that executor nor the variable that selected it. Other engines keep
    vLLM's."""
    assert Executor.get_class(on_cuda(None)) is RayExecutorV2
    variable = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
    with monkeypatch.context() as newer:
        newer.delitem(envs.environment_variables, variable, False)
        backend = on_cuda(dflash(pair)).parallel_config.distributed_executor_backend
        assert backend is DFlashRayExecutor
    older = pytest.importorskip("vllm.v1.executor.ray_executor", reason="gone in vLLM 0.33")
    monkeypatch.setenv(variable, "0")
    config = on_cuda(dflash(pair))
    assert config.parallel_config.distributed_executor_backend == "ray"
    assert Executor.get_class(config) is older.RayDistributedExecutor


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> str:
    """Another vLLM, whose Ray executor has changed; what is missing there."""
    gone = "vllm.v1.executor.ray_executor_v2:RayExecutorV2.gone"
    found = {"ray": f"it has no {gone}"}
    monkeypatch.setattr("vllm.__version__", "0.34.0")
    monkeypatch.setattr(compatibility, "first_difference", lambda _, parts: found.get(parts[0]))
    return gone


def test_a_vllm_with_another_ray_executor_keeps_it(
    on_cuda: Callable[..., VllmConfig], pair: Pair, renamed: str
) -> None:
    """Without Ray, the engine is ours all the same."""
    with log_lines() as lines:
        config = on_cuda(dflash(pair))
    assert config.parallel_config.distributed_executor_backend == "ray"
    assert not config.parallel_config.worker_cls.startswith("vllm_dflash")
    assert len([line for line in lines if "stays out" in line and renamed in line]) == 1
    with pytest.raises(ValueError, match=f"cannot run .*{renamed}"):
        on_cuda(dflash(pair) | {"require": True})
    config = pair.start(dflash(pair))
    assert config.parallel_config.worker_cls == engine_options.GPU_WORKER


def test_a_renamed_function_stops_ours_only(renamed: str) -> None:
    """An engine without DFlash registers the plugin as well, and still starts."""
    plugin.register()
    with pytest.raises(compatibility.UnsupportedVllmError, match=renamed):
        object.__new__(DFlashRayExecutor)._init_executor()


def test_vllms_own_backend_is_refused_on_cpus(pair: Pair) -> None:
    """The error comes before any process starts, and names our executor."""
    with pytest.raises(ValueError, match=rf"to '{engine_options.CPU_RAY_EXECUTOR}', or to 'mp'"):
        pair.start(tensor_parallel_size=2, distributed_executor_backend="ray")


def test_our_executor_refuses_gpus_and_bundle_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = object.__new__(CPURayExecutor)
    monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", "0,1")
    with pytest.raises(ValueError, match="Unset VLLM_RAY_BUNDLE_INDICES"):
        executor._init_executor()
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    with pytest.raises(ValueError, match="--distributed-executor-backend ray"):
        executor._init_executor()


@pytest.mark.parametrize("error", [None, NodeError("node 10.0.0.2")])
def test_vllms_names_are_ours_only_while_workers_start(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    names = ("RayWorkerProc", "initialize_ray_cluster", "get_bundles_sorted_by_node")
    before = [getattr(ray_executor_v2, name) for name in names]
    during: list[Any] = []

    def init_executor(executor: CPURayExecutor) -> None:
        during.extend(getattr(ray_executor_v2, name) for name in names)
        executor.response_mqs = []
        if error:
            raise error

    monkeypatch.setattr(RayExecutorV2, "_init_executor", init_executor)
    monkeypatch.setattr(ray_executor, "check_vllm", lambda *_: None)
    serve = [{"CPU": 1.0}, {"CPU": 8.0}, {"GPU": 1.0}, {"CPU": 6.5}]
    places = [(1, "aa", "10.0.0.1"), (3, "bb", "10.0.0.2")]
    monkeypatch.setattr(CPURayExecutor, "_place_workers", lambda _: places)
    executor = object.__new__(CPURayExecutor)
    executor.parallel_config = SimpleNamespace(placement_group=SimpleNamespace(bundle_specs=serve))
    if error:
        with pytest.raises(NodeError):
            executor._init_executor()
    else:
        executor._init_executor()
    worker, connect, bundles = during
    assert worker is CPURayWorkerProc
    assert connect(executor.parallel_config, require_gpu_on_driver=False) is None
    assert bundles("group") == places
    assert executor._threads == 6  # of the smallest bundle
    assert [getattr(ray_executor_v2, name) for name in names] == before


def test_a_core_that_a_worker_may_not_use_is_named() -> None:
    with pytest.raises(ValueError, match=r"VLLM_CPU_OMP_THREADS_BIND='9999' names cores \[9999\]"):
        keep_to_cores("9999", 0, 1)


def test_readers_nap_after_a_message_and_sleep_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    slept: list[int | None] = []
    condition = SimpleNamespace(wait=slept.append, last_read=time.monotonic(), busy_loop_s=6e5)
    queue: Any = SimpleNamespace(_is_local_reader=True, _spin_condition=condition)
    nap_while_waiting(queue)
    condition.wait(5)
    assert (slept, naps) == ([], [SECONDS_OF_A_NAP])
    condition.last_read -= 6e5
    condition.wait(5)
    assert (slept, naps) == ([5], [SECONDS_OF_A_NAP])
    remote: Any = SimpleNamespace(_is_local_reader=False)  # it reads from a socket
    nap_while_waiting(remote)


@pytest.mark.parametrize("is_own", [True, False])
def test_cpus_that_an_engine_has_reserved_are_given_back(
    monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    """They are given back once. A group of the caller's is left alone."""
    removed: list[str] = []
    util = SimpleNamespace(
        get_current_placement_group=lambda: None if is_own else "the caller's",
        remove_placement_group=removed.append,
    )
    ray = SimpleNamespace(is_initialized=lambda: True, util=util)
    monkeypatch.setattr(ray_executor, "ray", ray)
    monkeypatch.setattr(ray_executor, "reserve_cpus", lambda workers: f"CPUs of {workers}")
    monkeypatch.setattr(ray_executor, "worker_bundles", lambda group, workers: [group])
    monkeypatch.setattr(RayExecutorV2, "shutdown", lambda _: None)
    executor: Any = CPURayExecutor.__new__(CPURayExecutor)
    executor._own_group = None
    executor.parallel_config = SimpleNamespace(world_size=2, placement_group=None)
    assert executor._place_workers() == ["CPUs of 2" if is_own else "the caller's"]
    assert removed == []
    executor.shutdown()
    executor.shutdown()
    assert removed == ["CPUs of 2"] * is_own


@pytest.mark.parametrize(
    ("node", "engine", "expected"),
    [("0-3", "4-7", "0-3"), (None, "4-7", "4-7"), ("0-3", None, "0-3"), (None, None, "auto")],
)
def test_a_nodes_own_binding_overrides_the_engines(
    monkeypatch: pytest.MonkeyPatch, node: str | None, engine: str | None, expected: str
) -> None:
    bound: list[Any] = []
    monkeypatch.delenv(BINDING, raising=False)
    if node is not None:
        monkeypatch.setenv(BINDING, node)
    context = SimpleNamespace(get_node_id=lambda: "aa")
    monkeypatch.setattr(ray_worker, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    monkeypatch.setattr(ray_worker, "take_full_priority", lambda: None)
    monkeypatch.setattr(ray_worker, "nap_while_waiting", lambda _: None)
    monkeypatch.setattr(ray_worker, "keep_to_cores", lambda *what: bound.append(what))
    monkeypatch.setattr(RayWorkerProc, "initialize_worker", lambda *_: None)
    worker: Any = CPURayWorkerProc.__new__(CPURayWorkerProc)
    worker.rpc_broadcast_mq = None
    worker.initialize_worker(
        1, {}, "tcp://10.0.0.1:80", {BINDING: engine} if engine else {}, [0, 1]
    )
    assert bound == [(expected, 1, 2)]
