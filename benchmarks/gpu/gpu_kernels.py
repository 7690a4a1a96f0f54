"""Check that all modules import, that vLLM's and our kernels load and compute what PyTorch does.

Needs no pytest, because it runs first on a machine that may lack packages.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NEEDED = (
    *("vllm.v1.worker.gpu.model_runner", "vllm.v1.attention.backends.triton_attn"),
    *(
        "vllm.entrypoints.llm",
        "vllm_dflash.engine.v2.v2_workers",
        "vllm_dflash.engine.choose_scheduler",
    ),
    *("vllm_dflash.engine.v2.speculator", "vllm_dflash.model.draft_model"),
)
ON_CUDA = ("vllm._C_stable_libtorch", "vllm.v1.attention.backends.flash_attn")
OPTIONAL = (
    *("vllm.vllm_flash_attn._vllm_fa2_C", "vllm.vllm_flash_attn._vllm_fa3_C"),
    *("flashinfer", "flashmla", "deep_gemm", "pytest", "hypothesis", "matplotlib"),
)
"""Modules that are not needed; they are named if absent."""
Check = tuple[str, Callable[[], str]]


def imports(names: tuple[str, ...]) -> Iterator[Check]:
    """Yield a check for each module."""
    for name in names:

        def load(name: str = name) -> str:
            importlib.import_module(name)
            return "ok"

        yield f"import {name}", load


def about() -> Iterator[Check]:
    """Yield checks that name what is installed."""

    def versions() -> str:
        import torch
        import triton

        gpu = torch.cuda.get_device_name()
        return f"{gpu}, CUDA {torch.version.cuda}, torch {torch.__version__}, {triton.__version__}"

    def plugin() -> str:
        from importlib.metadata import entry_points

        (found,) = entry_points(group="vllm.general_plugins", name="dflash")
        return found.value

    yield from (("versions", versions), ("entry point", plugin))


def vllms_kernels() -> Iterator[Check]:
    """Yield checks of two kernels of vLLM that every model runs."""
    import torch
    from torch.nn import functional
    from vllm import _custom_ops as ops

    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 4e-2)):
        x = torch.randn(37, 1024, device="cuda", dtype=dtype)
        weight = torch.rand(1024, device="cuda", dtype=dtype)

        def norm(x: Any = x, weight: Any = weight, limit: float = limit) -> str:
            out = torch.empty_like(x)
            ops.rms_norm(out, x, weight, 1e-6)
            expected = functional.rms_norm(x.float(), (1024,), weight.float(), 1e-6)
            return near(out, expected, limit)

        def gate(x: Any = x, limit: float = limit) -> str:
            out = x.new_empty(37, 512)
            torch.ops._C.silu_and_mul(out, x)
            first, second = x.float().chunk(2, dim=-1)
            return near(out, functional.silu(first) * second, limit)

        yield from ((f"rms_norm {dtype}", norm), (f"silu_and_mul {dtype}", gate))


def near(found: Any, expected: Any, limit: float) -> str:
    """Return how far apart they are; raises AssertionError if that is too far."""
    off = float((found.float() - expected.float()).abs().max())
    assert off <= limit, f"differs by {off:.2g}"
    return f"differs by {off:.1g}"


def our_kernels(sizes: str) -> Iterator[Check]:
    """Yield a check for each of tests/support/kernel_oracles.py, in sizes for a GPU or a CPU."""
    from support.kernel_oracles import ORACLES

    for oracle in ORACLES:
        for case, dtype in oracle.cases_on(sizes):

            def check(oracle: Any = oracle, case: str = case, dtype: Any = dtype) -> str:
                return f"differs by {oracle.check(case, dtype, 'cuda'):.1g}"

            yield f"{oracle.name}, {case}, {dtype}", check


def run(checks: Iterator[Check], found: dict[str, str], file: Path, failed: int = 0) -> int:
    """Run checks, writing each result, as time may be over any moment. Returns failures so far."""
    for name, check in checks:
        try:
            found[name] = check()
        except KeyboardInterrupt:  # the time is over
            raise
        except BaseException as error:  # a library that fails to load may raise anything
            failed += 1
            found[name] = f"FAILED: {type(error).__name__}: {str(error)[:300]}"
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
        tell(file, found, failed)
    return failed


def main(sizes: str, file: Path) -> int:
    """Run all checks, writing results after each. `sizes`: "cuda" or "cpu"."""
    found: dict[str, str] = {}
    groups: list[Callable[[], Iterator[Check]]] = [about, lambda: imports(NEEDED + ON_CUDA)]
    groups += [vllms_kernels, lambda: our_kernels(sizes)]
    failed = 0
    for group in groups:
        try:
            failed = run(group(), found, file, failed)
        except Exception as error:  # the whole group failed
            failed += 1
            found[f"group {len(found)}"] = f"FAILED: {error}"
            tell(file, found, failed)
    run(imports(OPTIONAL), found, file, failed)
    absent = [name for name in OPTIONAL if found[f"import {name}"] != "ok"]
    tell(file, found, failed, f"; without {', '.join(absent)}" if absent else "")
    return int(failed > 0)


def tell(file: Path, found: dict[str, str], failed: int, more: str = "") -> None:
    """Write the results so far."""
    verdict = f"{len(found)} checks, {failed} failed{more}; {found.get('versions', '')}"
    file.write_text(json.dumps({"verdict": verdict, "checks": found}, indent=1))


if __name__ == "__main__":
    code = main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a half-loaded library may hang at a normal exit
