"""The machine, and what it lacks."""

from __future__ import annotations

import os
import subprocess
from importlib import metadata
from pathlib import Path

from vllm_dflash import __version__

ROOT = Path(__file__).parents[2]
NO_GPU = "none"
GPU = ("name", "driver_version", "memory.total", "compute_cap", "power.limit")
"""What nvidia-smi is asked for."""
PACKAGES = ("vllm", "torch", "triton", "flashinfer-python", "transformers")
FOR_THE_KIT = ("vllm-dflash", "pytest", "hypothesis", "matplotlib")


def ask_gpu(*names: str) -> list[str]:
    """What nvidia-smi says of the first visible GPU; nothing where there is no driver."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = [f"--id={first or 0}", f"--query-gpu={','.join(names)}"]
    said = _output(["nvidia-smi", *query, "--format=csv,noheader,nounits"])
    return [value.strip() for value in said.split(",")] if said else []


def describe_machine() -> dict[str, str]:
    """GPU, versions, commit. Outcomes of another one are not kept."""
    facts = dict(zip(GPU, ask_gpu(*GPU), strict=False)) or {"name": NO_GPU}
    facts["vllm-dflash"] = __version__
    facts |= {name: version for name in PACKAGES if (version := _version(name))}
    return facts | {"commit": _output(["git", "describe", "--always", "--dirty"]) or "unknown"}


def lacking(machine: dict[str, str]) -> str | None:
    """What a real run needs and is not there, in one line."""
    absent = ["a GPU with NVIDIA's driver"] if machine["name"] == NO_GPU else []
    if not (absent or machine["memory.total"].isdecimal()):
        absent.append("a GPU with memory of its own, of a size that nvidia-smi can tell")
    absent += ["vLLM's CUDA build"] if "cpu" in machine.get("vllm", "cpu") else []
    absent += [name for name in FOR_THE_KIT if not _version(name)]
    if not absent:
        return None
    where = 'on a machine with a GPU: pip install ".[cuda,bench]" pytest hypothesis'
    return f"make gpu needs {', '.join(absent)} ({where}), or ARGS=--dry-run"


def _version(package: str) -> str:
    """Of a package, if it is installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
