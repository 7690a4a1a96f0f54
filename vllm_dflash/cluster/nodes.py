"""Checks that every Ray node has what our workers need, before any worker starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_dflash import __version__

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

SECONDS_TO_ANSWER = 600.0
"""A node may first have to set up the job's runtime environment, including its packages."""


class NodeError(RuntimeError):
    """Nodes of the cluster cannot run our workers; the message names each one and its remedy."""


@dataclass(frozen=True)
class Node:
    """A node's answer, or why there is none."""

    ip: str
    node_id: str
    host: str = "unknown host"
    python: str | None = None
    """The node's Python interpreter; None if the node did not answer."""
    installed: Mapping[str, str] = field(default_factory=dict)
    """What must be the same on all nodes: display name to version."""
    problem: str = ""
    """Why `installed` is incomplete; empty if it is complete."""
    preload_unsupported_reason: str = ""
    """Why workers on this node cannot use the engine's LD_PRELOAD; empty if they can."""

    @property
    def name(self) -> str:
        """Address, host and id, as `ray list nodes` shows them."""
        return f"node {self.ip} ({self.host}, id {self.node_id})"


def build_probe(preload: Sequence[str] = ()) -> Callable[[], dict[str, Any]]:
    """Return the function to run on each node.

    It is a nested function because Ray sends those as code, so the node need not be able to import
    this module. It imports our package, which is light, but reads vLLM's version from its file.
    `preload`: the files in the engine's LD_PRELOAD.
    """

    def probe() -> dict[str, Any]:
        import hashlib
        import importlib
        import importlib.util
        import os
        import pathlib
        import platform
        import runpy
        import sys

        installed: dict[str, str] = {}
        answer = {"host": platform.node(), "python": sys.executable, "installed": installed}
        if missing := [name for name in preload if not os.path.exists(name)]:
            answer["preload_unsupported_reason"] = f"has no {', '.join(missing)}"
        elif preload and os.environ.get("LD_PRELOAD"):  # inherited from its raylet
            answer["preload_unsupported_reason"] = "was started with one already"
        try:
            package = importlib.import_module("vllm_dflash")
            installed["vllm-dflash"] = package.__version__
            # Tells builds of one version apart.
            folder = pathlib.Path(str(package.__file__)).parent
            sources = hashlib.sha256()
            for file in sorted(folder.rglob("*.py")):
                sources.update(f"{file.relative_to(folder).as_posix()}\0".encode())
                sources.update(hashlib.sha256(file.read_bytes()).digest())
            installed["another build of vllm-dflash, sources"] = sources.hexdigest()[:12]
            found = importlib.util.find_spec("vllm")
            if found is None or found.origin is None:
                raise ModuleNotFoundError("No module named 'vllm'")
            version = pathlib.Path(found.origin).with_name("_version.py")
            installed["vLLM"] = runpy.run_path(str(version))["__version__"]
        except Exception as error:
            answer["problem"] = f"{type(error).__name__}: {error}"
        return answer

    return probe


def ask_nodes(
    placement_group: PlacementGroup, runtime_env: Mapping[str, Any], preload: Sequence[str] = ()
) -> list[Node]:
    """Probe each node of a placement group once, in the runtime environment of its workers."""
    import ray
    from ray.util import placement_group_table
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    of_bundles = placement_group_table(placement_group)["bundles_to_node_id"].values()
    probe = ray.remote(build_probe(preload))
    asked = {
        node_id: probe.options(
            num_cpus=0,
            max_retries=0,
            runtime_env=dict(runtime_env),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote()
        for node_id in dict.fromkeys(of_bundles)
    }
    deadline = time.monotonic() + SECONDS_TO_ANSWER
    nodes = []
    for node_id, reference in asked.items():
        try:
            answer = ray.get(reference, timeout=max(1.0, deadline - time.monotonic()))
        except ray.exceptions.RayError as error:
            answer = {"problem": f"{type(error).__name__}: {error}"}
        nodes.append(Node(addresses.get(node_id, "unknown address"), node_id, **answer))
    return nodes


def nodes_unsupported_reason(
    nodes: Sequence[Node], own: Mapping[str, str], extra: str
) -> str | None:
    """Reason why nodes cannot run our workers, with the command that fixes each; None if all can.

    `own`: what is installed for the engine's process; `extra`: of our package, for this platform.
    """
    lines = []
    for node in nodes:
        other = next((name for name in own if node.installed.get(name) != own[name]), None)
        if node.problem:
            fault = f"vllm-dflash cannot run there: {node.problem}"
        elif other:
            fault = f"it has {other} {node.installed[other]}, the engine has {own[other]}"
        else:
            continue
        # `pip --python`: environments made by `scripts/setup.sh` have no pip of their own.
        command = f'pip --python {node.python} install ".[{extra}]"'
        remedy = f"on that node, in a checkout of the engine's vllm-dflash version, run: {command}"
        silent = "see Ray's log on that node"
        lines += [f"  {node.name}: {fault}", f"    {remedy if node.python else silent}"]
    if not lines:
        return None
    return "\n".join(
        [
            f"{len(lines) // 2} of {len(nodes)} nodes of the Ray cluster cannot run workers of"
            f" vllm-dflash {__version__}. Every node needs the same vllm-dflash and vLLM as the"
            " engine:",
            *lines,
            "Then restart the engine; Ray can stay up.",
        ]
    )


def check_nodes(
    placement_group: PlacementGroup, runtime_env: Mapping[str, Any], preload: Sequence[str] = ()
) -> list[Node]:
    """Probe the nodes, and raise if workers would fail on any of them.

    Returns:
        The nodes' answers. `preload` (the files in the engine's LD_PRELOAD) affects only
        `Node.preload_unsupported_reason`.

    Raises:
        NodeError: nodes lack our package, or have another build of it or another vLLM.
    """
    from vllm.platforms import current_platform

    nodes = ask_nodes(placement_group, runtime_env, preload)
    extra = "cpu" if current_platform.is_cpu() else "cuda"
    if reason := nodes_unsupported_reason(nodes, build_probe()()["installed"], extra):
        raise NodeError(reason)
    return nodes
