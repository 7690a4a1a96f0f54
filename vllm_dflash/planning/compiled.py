"""Compiles (numba) the index of texts: its loops over tokens would take Python too long."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numba
from llvmlite.binding import ffi, get_host_cpu_features, get_host_cpu_name
from numba.core import config

Function = TypeVar("Function", bound=Callable[..., object])


def _cache_folder() -> Path:
    """Return a folder named after this package's sources. Numba checks only a function's own file,
    so it would miss a change in one it calls. And packages may be installed in read-only places."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources))
    # A home may be shared by machines that cannot run each other's code.
    digest.update(f"{get_host_cpu_name()} {get_host_cpu_features().flatten()}".encode())
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches) / "vllm_dflash" / digest.hexdigest()[:16]


def _give_llvmlite_a_dict() -> None:
    """Keep llvmlite's library from answering `__dict__` with a C function, as it does any name.
    vLLM 0.32 on CPU looks into every object of every module that has one, so no engine starts in a
    process that has imported numba. Drop this when vLLM looks for a dict."""
    with suppress(AttributeError):
        ffi.lib._fntab.setdefault("__dict__", {})


_give_llvmlite_a_dict()
FOLDER = str(_cache_folder())


def compiled(function: Function) -> Function:
    """Compile a function when it is first called, or take it from the cache on disk."""
    compile_it = functools.partial(numba.njit, boundscheck=True, error_model="numpy")
    before, config.CACHE_DIR = config.CACHE_DIR, FOLDER
    try:
        function_of_c = compile_it(cache=True)(function)
        # A full disk is no reason not to serve: numba has a guard, but only for Windows.
        function_of_c._cache._guard_against_spurious_io_errors = lambda: suppress(OSError)
        return function_of_c
    except (OSError, RuntimeError):  # no place to write to
        return compile_it()(function)
    finally:
        config.CACHE_DIR = before
