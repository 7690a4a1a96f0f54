"""Whether this vLLM has what we rely on; checked in the front end, before anything starts.

`seams/` has a record of each release that tests run with (`make seams`). Any other release is
compared with the record of the one before it, in a child process: importing vLLM's workers may
initialise CUDA, and vLLM could then not fork its engine.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_dflash import __version__

RECORDS = Path(__file__).with_name("seams")
SUPPORTED_VLLM = SpecifierSet(">=0.32.0,<0.34")
"""The releases that tests run with, and their patch releases."""
NEWEST = Version("9999")
SECONDS_TO_COMPARE = 600.0
"""A busy machine imports vLLM's workers in minutes."""
DIFFERENCE = "vllm-dflash found:"
"""Begins what the process that compares says last."""


class UnsupportedVllmError(RuntimeError):
    """vllm-dflash was not built for this vLLM; the message names what differs."""


def parse_version(version: str) -> Version:
    """Parse a version. An invalid one counts as the newest, and so does that of a build from a
    clone without tags, 0.1.dev1."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return NEWEST
    return NEWEST if parsed.is_devrelease and parsed.release == (0, 1) else parsed


def untested(version: str) -> str:
    """Warning about a vLLM that our tests do not run with; empty if they do.

    They run with releases in `SUPPORTED_VLLM`. A later release, a prerelease, a nightly or a build
    without a version may contain anything.
    """
    parsed = parse_version(version)
    if not parsed.is_prerelease and parsed.public in SUPPORTED_VLLM:
        return ""
    return (
        f"vllm-dflash {__version__} was never tested with vLLM {version}, only with"
        f" {SUPPORTED_VLLM}. Everything it relies on is there, so it runs."
    )


def vllm_unsupported_reason(*parts: str) -> str | None:
    """Why these parts cannot run with this vLLM, and what to install; None if they can.

    `parts`: names in a record, such as "v2" for a worker with Model Runner V2.
    """
    import vllm

    version, parsed = vllm.__version__, parse_version(vllm.__version__)
    ours = f"vllm-dflash {__version__} supports vLLM {SUPPORTED_VLLM}, this is vLLM {version}"
    tested = sorted(Version(file.stem) for file in RECORDS.glob("*.json"))
    if Version(parsed.base_version) < tested[0]:
        return f"{ours} (install a newer vLLM)"
    if not parsed.is_prerelease and Version(parsed.public) in tested:
        return None
    before = max(one for one in tested if one <= Version(parsed.base_version))
    difference = first_difference(str(before), parts)
    if difference is None:
        return None
    releases = " or ".join(map(str, tested))
    return f"{ours}: {difference} (install a vllm-dflash for this vLLM, or vLLM {releases})"


def check_vllm(*parts: str) -> None:
    """Refuse a vLLM that these parts cannot run with. Raises `UnsupportedVllmError`."""
    if reason := vllm_unsupported_reason(*parts):
        raise UnsupportedVllmError(reason)


@lru_cache(maxsize=8)
def first_difference(release: str, parts: tuple[str, ...]) -> str | None:
    """First thing that the installed vLLM lacks, or that takes other parameters, compared with the
    record of a release; None if there is none. Starts a process, which takes seconds."""
    # The child imports what this process would: -P leaves out its working directory.
    command = [sys.executable, "-P", "-m", __name__, release, *parts]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            timeout=SECONDS_TO_COMPARE,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it could not be checked ({error})"
    if ended.returncode == 0:
        return None
    _, found, difference = ended.stdout.rpartition(DIFFERENCE)
    if not found and ended.returncode > 0:  # it could not compare
        difference = ended.stderr.strip().rpartition("\n")[2]
    return difference.strip() or f"its check ended with {ended.returncode}"


def differences(record: dict[str, Any], parts: tuple[str, ...]) -> Iterator[str]:
    """Yield what differs from a record: names that we import, and functions and attributes."""
    for part in parts:
        entries = dict.fromkeys(record["names"].get(part, ()), None)
        entries |= {path: one["parameters"] for path, one in record["seams"].get(part, {}).items()}
        for path, parameters in entries.items():
            try:
                found = find(path)
                takes = None if parameters is None else parameters_of(found)
            except Exception as error:  # importing a module runs it
                yield f"it has no {path}, because {error}"
                continue
            if takes != parameters:
                yield f"{path} takes ({takes}), not ({parameters})"


def find(path: str) -> Any:
    """Import `module:attribute`. The attribute may have dots, or be a module; None for a field
    that only objects have. Raises `ImportError` or `AttributeError`."""
    module, _, attribute = path.partition(":")
    found: Any = import_module(module)
    for name in attribute.split("."):
        fields = (
            {**vars(kind).get("__annotations__", {}), **vars(kind).get("__dataclass_fields__", {})}
            for kind in getattr(found, "__mro__", ())
        )
        if inspect.ismodule(found) and not hasattr(found, name):
            found = import_module(f"{module}.{name}")
        else:
            found = getattr(found, name, *((None,) if any(name in one for one in fields) else ()))
    return found


def parameters_of(function: Any) -> str:
    """Parameter names of a function of vLLM's, or of a Triton kernel, separated by spaces."""
    function = getattr(function, "fn", getattr(function, "__func__", function))
    return " ".join(inspect.signature(function).parameters)


if __name__ == "__main__":
    written = json.loads((RECORDS / f"{sys.argv[1]}.json").read_text())
    if found := next(differences(written, tuple(sys.argv[2:])), None):
        print(DIFFERENCE, found)
        sys.exit(1)
