"""A Ray cluster of CPU nodes: TP=2 across two of them, and a node that lacks the package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from engine_child import EngineChild
from vllm import LLM

from support import importing_support
from support.engines import FIXED, TARGET, held_out_prompts, nats_behind
from support.ray_child import MARK
from support.ray_cluster import HEAD, NOT_UP, RayCluster, ray_cluster
from support.waiting import wait_until
from vllm_dflash.config.engine_options import CPU_RAY_EXECUTOR, CPU_WORKER_V1
from vllm_dflash.tools.completions import Request
from vllm_dflash.tools.server import EngineDied

# In about one run of fifty, a cluster's nodes never came up. Each test has a new cluster.
RERUN = pytest.mark.flaky(reruns=1, only_rerun=[NOT_UP])
pytestmark = [pytest.mark.engine, pytest.mark.cluster, RERUN]
WHOLE = {**FIXED, "draft_tensor_parallel_size": 1}
"""Each worker holds the whole drafter; test_tensor_parallel.py has engines with a split one."""
TOKENS = 32
ROUNDING = 1e-3
"""Nats. Ranks only add up their parts in another order than one rank does, in float32."""


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        yield cluster


def child_on(cluster: RayCluster, log: Path, **environment: str) -> EngineChild:
    return EngineChild(
        log,
        "support.ray_child:RayEngine.start",
        model=str(TARGET),
        speculative_config=WHOLE,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        tensor_parallel_size=2,
        distributed_executor_backend=CPU_RAY_EXECUTOR,
        environment={
            **cluster.access,
            **importing_support(),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `look_around` is sent to the workers
            **environment,
        },
    )


def test_two_nodes_write_what_plain_decoding_writes(
    cluster: RayCluster, plain: LLM, tmp_path: Path
) -> None:
    with cluster.joined("127.0.0.3"):
        with child_on(cluster, tmp_path / "log", **{MARK: "carried"}) as child:
            prompts = child.ask("encode", texts=held_out_prompts(6))
            requests = [Request(one, TOKENS) for one in prompts]
            written = child.ask("complete", requests=requests, concurrency=4)
            workers, every_stats = child.ask("workers"), child.ask("dflash_stats")
        wait_until(
            lambda: not any(psutil.pid_exists(worker["pid"]) for worker in workers), "no workers"
        )
        mapped = {Path(path) for worker in workers for path in worker["shared_memory"]}
        # Python's tracker may still be cleaning up after a process that has just ended.
        wait_until(lambda: not any(path.exists() for path in mapped), f"none of {mapped}")

    for prompt, (text, _) in zip(prompts, written, strict=True):
        assert max(nats_behind(plain, [prompt + text], len(text))) < ROUNDING
    assert {worker["node"] for worker in workers} == {HEAD, "127.0.0.3"}
    assert len({worker["actor"] for worker in workers} - {None}) == 2
    for worker, stats in zip(workers, every_stats, strict=True):
        assert worker["worker"] == CPU_WORKER_V1
        assert worker["has_plugin"]
        assert worker["mark"] == "carried"
        assert worker["threads"] == 1  # its bundle has one CPU
        assert worker["niceness"] == (0 if may_raise_priority() else 15)  # Ray's own is 15
        assert not worker["uses_shared_memory"]  # the nodes have none in common
        assert worker["preloaded"] == os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
        assert stats["proposer"] == "vllm_dflash.engine.v1.proposer.PlannedProposer"
        assert stats["accepted_tokens"] > 50
    assert any(worker["shared_memory"] for worker in workers)  # on the engine's own node


def may_raise_priority() -> bool:
    """Return whether this process has CAP_SYS_NICE, by the kernel's number of it."""
    status = Path("/proc/self/status").read_text()
    (effective,) = (line.split()[1] for line in status.splitlines() if line.startswith("CapEff"))
    return bool(int(effective, 16) >> 23 & 1)


BLOCK = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm_dflash":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def test_a_node_without_the_package_is_named(cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    with (
        cluster.joined("127.0.0.4", PYTHONPATH=str(tmp_path)),
        child_on(cluster, tmp_path / "log", VLLM_ENABLE_V1_MULTIPROCESSING="0") as child,
        pytest.raises(EngineDied) as died,
    ):
        child.ask("facts")
    message = (tmp_path / "log").read_text()
    assert "NodeError: 1 of 2 nodes of the Ray cluster cannot run workers of" in str(died.value)
    assert "node 127.0.0.4 (" in message
    assert "ModuleNotFoundError: No module named 'vllm_dflash'" in message
    assert "in a checkout of the engine's vllm-dflash version, run: pip --python " in message
    assert f"node {HEAD} (" not in message
