"""Has every node what a worker of ours needs? Asked of the nodes before any worker starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_dflash import __version__

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

SECONDS_TO_ANSWER = 600.0
"""A node may have to set up the environment that a job asks for, packages included."""


class NodeError(RuntimeError):
    """Nodes of the cluster cannot run our workers; the message names each, and what to do there."""


@dataclass(frozen=True)
class Node:
    """What a node answered, or why it did not."""

    ip: str
    node_id: str
    host: str = "unknown host"
    python: str = "python"
    """The interpreter that workers run in there."""
    package: str | None = None
    """Version of vllm-dflash; None where it cannot be imported."""
    build: str | None = None
    """Hash of its sources, which tells builds of one version apart."""
    vllm: str | None = None
    problem: str = ""
    """Why not."""
    is_import: bool = False
    """Whether that is an import that failed there: installing the package is the remedy."""
    has_own_preload: bool = False
    """Whether its raylet was started with LD_PRELOAD."""
    missing_files: tuple[str, ...] = ()
    """Those of the files asked for that are not there."""

    @property
    def name(self) -> str:
        """As people look it up: `ray list nodes` shows the same."""
        return f"node {self.ip} ({self.host}, id {self.node_id})"


def build_probe(files: Sequence[str] = ()) -> Callable[[], dict[str, Any]]:
    """What runs on a node. A nested function, for those are sent as code: nothing to import there.

    It imports our package, which is light, but only reads vLLM's version, which is not.
    """

    def probe() -> dict[str, Any]:
        import hashlib
        import importlib
        import importlib.util
        import os
        import pathlib
        import platform
        import sys

        answer: dict[str, Any] = {
            "host": platform.node(),
            "python": sys.executable,
            "has_own_preload": bool(os.environ.get("LD_PRELOAD")),
            "missing_files": tuple(name for name in files if not os.path.exists(name)),
        }
        try:
            package = importlib.import_module("vllm_dflash")
            answer["package"] = package.__version__
            folder = pathlib.Path(str(package.__file__)).parent
            sources = hashlib.sha256()
            for file in sorted(folder.rglob("*.py")):
                sources.update(f"{file.relative_to(folder).as_posix()}\0".encode())
                sources.update(hashlib.sha256(file.read_bytes()).digest())
            answer["build"] = sources.hexdigest()[:12]
            found = importlib.util.find_spec("vllm")
            if found is None or found.origin is None:
                raise ModuleNotFoundError("No module named 'vllm'")
            version = os.path.join(os.path.dirname(found.origin), "_version.py")
            spec = importlib.util.spec_from_file_location("_version_of_vllm", version)
            assert spec is not None and spec.loader is not None  # noqa: PT018
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            answer["vllm"] = module.__version__
        except Exception as error:
            answer["problem"] = f"{type(error).__name__}: {error}"
            answer["is_import"] = isinstance(error, ImportError)
        return answer

    return probe


def ask_nodes(
    placement_group: PlacementGroup, runtime_env: Mapping[str, Any], files: Sequence[str] = ()
) -> list[Node]:
    """Ask each node of a placement group once, in the environment that its workers will have."""
    import ray
    from ray.util import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    bundles = {
        node_id: bundle
        for bundle, node_id in placement_group_table(placement_group)["bundles_to_node_id"].items()
    }
    probe = ray.remote(build_probe(files))
    asked = {
        node_id: probe.options(
            num_cpus=0,
            max_retries=0,
            runtime_env=dict(runtime_env),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=placement_group, placement_group_bundle_index=bundle
            ),
        ).remote()
        for node_id, bundle in bundles.items()
    }
    deadline = time.monotonic() + SECONDS_TO_ANSWER
    nodes = []
    for node_id, reference in asked.items():
        ip = addresses.get(node_id, "unknown address")
        try:
            answer = ray.get(reference, timeout=max(1.0, deadline - time.monotonic()))
        except ray.exceptions.RayError as error:
            nodes.append(Node(ip, node_id, problem=f"{type(error).__name__}: {error}"))
        else:
            nodes.append(Node(ip, node_id, **answer))
    return nodes


def describe_faults(nodes: Iterable[Node], own: Node, extra: str) -> str | None:
    """What is wrong with these nodes and the command to mend it, for people; None: nothing.

    Args:
        nodes: their answers.
        own: that of the engine's own process, which the others must agree with.
        extra: of the package, that brings this platform's vLLM.
    """
    lines = []
    nodes = list(nodes)
    for node in nodes:
        checkout = f"in a checkout of vllm-dflash {__version__}"
        if node.problem:
            fault = f"vllm-dflash cannot run there: {node.problem}"
        elif node.package != own.package:
            fault = f"it has vllm-dflash {node.package}, the engine {own.package}"
        elif node.build != own.build:
            fault = (
                f"it has another build of vllm-dflash {own.package}: its sources are {node.build},"
                f" the engine's {own.build}"
            )
            checkout = "in the checkout that the engine's was installed from"
        elif node.vllm != own.vllm:
            fault = f"it has vLLM {node.vllm}, the engine {own.vllm}"
        else:
            continue
        # A pip of outside: an environment that `scripts/setup.sh` made has none.
        remedy = f'there, {checkout}: pip --python {node.python} install ".[{extra}]"'
        if node.problem and not node.is_import:
            remedy = "Ray's log of that node says more"
        lines += [f"  {node.name}: {fault}", f"    {remedy}"]
    if not lines:
        return None
    count = f"{len(lines) // 2} of {len(nodes)} nodes"
    return "\n".join(
        [
            f"{count} of the Ray cluster cannot run workers of vllm-dflash {__version__}."
            " Every node needs the package and the vLLM that the engine has:",
            *lines,
            "Then start the engine again; Ray itself can stay up.",
        ]
    )


def check_nodes(
    placement_group: PlacementGroup, runtime_env: Mapping[str, Any], files: Sequence[str] = ()
) -> list[Node]:
    """Ask, and stop where workers would fail.

    Returns:
        What the nodes answered; `files` is for `Node.missing_files`.

    Raises:
        NodeError: nodes lack the package, or have another build of it or another vLLM.
    """
    from vllm.platforms import current_platform

    nodes = ask_nodes(placement_group, runtime_env, files)
    own = Node("here", "", **build_probe()())
    if own.problem:
        raise NodeError(f"the engine's own vLLM cannot be told the version of: {own.problem}")
    faults = describe_faults(nodes, own, "cpu" if current_platform.is_cpu() else "cuda")
    if faults:
        raise NodeError(faults)
    return nodes
