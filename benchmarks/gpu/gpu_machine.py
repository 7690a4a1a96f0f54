"""The machine: its description, and what it lacks."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Collection, Iterable, Mapping
from importlib import metadata
from pathlib import Path

from vllm_dflash import __version__

ROOT = Path(__file__).parents[2]
NO_GPU = "none"
GPU = ("name", "driver_version", "memory.total", "compute_cap", "power.limit")
"""Fields that nvidia-smi is asked for."""
ITS_OWN = ("driver_version", "memory.total", "power.limit")
"""Fields in which machines with one kind of GPU may differ. Their results are reported together."""
PACKAGES = ("vllm", "torch", "triton", "flashinfer-python", "transformers")
SOURCES = (
    *("vllm_dflash/**/*.py", "benchmarks/gpu/**/*.py", "benchmarks/demo_models.py"),
    *("benchmarks/parity/*.py", "benchmarks/reference/*.py"),
    *("tests/engine/test_cuda*.py", "tests/support/**/*.py", "tests/conftest.py"),
)
"""Files that an outcome depends on. Not the commit, which does not travel with copied files."""

TELLING = re.compile(
    r"vllm-dflash \S+ is active.*|draft lengths .*|Using \S+ (?:attention )?backend.*|"
    r"Model loading took.*|Available KV cache memory.*|KV cache size.*|"
    r"Graph capturing finished.*|CUDA graph pool memory.*|Triton .*during inference.*"
)
"""Lines of an engine's log about planning, backends, graphs and memory, and about kernels that are
compiled while it serves."""


def telling_lines(log: Path) -> list[str]:
    """Return each telling line once, without the text before the match."""
    return list(dict.fromkeys(TELLING.findall(log.read_text(errors="replace"))))


def ask_gpu(*names: str) -> list[str]:
    """Ask nvidia-smi about the first visible GPU. Returns nothing if there is no driver."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = [f"--id={first or 0}", f"--query-gpu={','.join(names)}"]
    said = _output(["nvidia-smi", *query, "--format=csv,noheader,nounits"])
    return [value.strip() for value in said.split(",")] if said else []


def memory_of(processes: Collection[int]) -> list[int]:
    """Return the MiB of the GPU that these processes use, as one number; none where the driver does
    not tell."""
    query = ["--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]
    wanted = {str(process) for process in processes}
    lines = [line.split(", ") for line in _output(["nvidia-smi", *query]).splitlines()]
    used = [int(mib) for pid, mib in lines if pid in wanted and mib.isdecimal()]
    return [sum(used)] if used else []


def describe_machine() -> dict[str, str]:
    """Describe GPU, driver, versions, sources (a digest). Outcomes of other kinds are not kept."""
    facts = dict(zip(GPU, ask_gpu(*GPU), strict=False)) or {"name": NO_GPU}
    facts |= {"python": platform.python_version(), "vllm-dflash": __version__}
    facts |= {name: found for name in PACKAGES if (found := version_of(name))}
    files = {file for pattern in SOURCES for file in ROOT.glob(pattern)}
    return facts | {"sources": digest(files)}


def kind_of(machine: Mapping[str, str]) -> dict[str, str]:
    """Return the facts that are equal for all outcomes of one report."""
    return {name: value for name, value in machine.items() if name not in ITS_OWN}


def together(machines: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Merge descriptions of machines of one kind. Where they differ, each value is named once."""
    values: dict[str, dict[str, None]] = {}
    for machine in machines:
        for name, value in machine.items():
            values.setdefault(name, {})[value] = None
    return {name: ", ".join(found) for name, found in values.items()}


def digest(files: Iterable[Path]) -> str:
    """Digest of the files' contents and their places in the repository."""
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(f"{file.relative_to(ROOT).as_posix()}\0".encode())
        found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:12]


def lacking(machine: Mapping[str, str]) -> str | None:
    """Say in one line what every part needs and this machine lacks."""
    absent = ["a GPU with NVIDIA's driver"] if machine["name"] == NO_GPU else []
    if not (absent or machine["memory.total"].isdecimal()):
        absent.append("a GPU with memory of its own, of a size that nvidia-smi can tell")
    absent += ["vLLM's CUDA build"] if "cpu" in machine.get("vllm", "cpu") else []
    absent += [] if version_of("vllm-dflash") else ["vllm-dflash installed"]
    if not absent:
        return None
    where = 'on a machine with a GPU: pip install ".[cuda,bench]" pytest hypothesis'
    return f"make gpu needs {', '.join(absent)} ({where}), or ARGS=--dry-run"


def version_of(package: str) -> str:
    """Return the version of a package, or nothing if it is not installed."""
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
