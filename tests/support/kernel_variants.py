"""Which variants of our kernels Triton would compile for a GPU, seen where they are interpreted.

Triton compiles a kernel again for other types, for numbers that are 1 or multiples of 16, for
addresses that are multiples of 16 or not, and for other constants. In a step, that takes seconds.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from triton.backends.compiler import BaseBackend
from triton.runtime import interpreter
from triton.runtime.jit import native_specialize_impl

Variant = tuple[str, ...]
"""Name of a kernel, and what its arguments are to Triton."""


@contextmanager
def compiled() -> Iterator[set[Variant]]:
    """Collect the variants of our kernels that are launched or captured inside."""
    found: set[Variant] = set()
    run = interpreter.InterpretedFunction.run

    def noted(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if kernel.fn.__module__.startswith("vllm_dflash"):
            found.add(variant_of(kernel, *args, **kwargs))
        return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "run", noted)
        yield found


@contextmanager
def launched() -> Iterator[dict[str, dict[str, Any]]]:
    """Collect what a compiler needs to know of our kernels that are launched inside, whatever their
    sizes: name, types of arguments (of tensors that may be missing, None) and constants. By itself
    as JSON, since many launches are alike."""
    found: dict[str, dict[str, Any]] = {}
    run = interpreter.GridExecutor.__call__

    def noted(grid: Any, *args: Any, **kwargs: Any) -> Any:
        if grid.fn.__module__.startswith("vllm_dflash."):  # not vLLM's, which oracles may run
            parameters = inspect.signature(grid.fn).parameters
            values = {**dict(zip(parameters, args, strict=False)), **kwargs}
            fixed = [n for n in parameters if "constexpr" in str(parameters[n].annotation)]
            types = {
                name: value
                if value is None
                else native_specialize_impl(BaseBackend, value, False, False, False)[0]
                for name, value in values.items()
                if name in parameters and name not in fixed
            }
            one = {
                "kernel": f"{grid.fn.__module__.rpartition('.')[2]}.{grid.fn.__name__}",
                "types": types,
                "fixed": {name: values[name] for name in fixed},
            }
            found[json.dumps(one)] = one
        return run(grid, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", noted)
        yield found


def variant_of(kernel: Any, *args: Any, **kwargs: Any) -> Variant:
    """Return the variant that a launch with these arguments needs."""
    signature = inspect.signature(kernel.fn)
    given = {name: kwargs.pop(name) for name in [*kwargs] if name in signature.parameters}
    never, unaligned = (
        kernel.kwargs[name] or ()
        for name in ("do_not_specialize", "do_not_specialize_on_alignment")
    )
    told = [f"{name}={value}" for name, value in sorted(kwargs.items())]  # warps and stages
    for name, value in signature.bind(*args, **given).arguments.items():
        if "constexpr" in str(signature.parameters[name].annotation):
            told.append(f"{name}={value}")
        else:
            kind = native_specialize_impl(
                BaseBackend, value, False, name not in never, name not in unaligned
            )
            told.append(f"{name}: {kind}")
    return kernel.fn.__name__, *told
