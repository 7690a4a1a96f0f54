"""Triton's interpreter without a device: made faster, with its launches queued."""

from __future__ import annotations

import dataclasses
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np


def pretend_a_device() -> None:
    """Make vLLM define its kernels: for compiling for a GPU, unless they are interpreted."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=_NoDevice, compiler=None)


class _NoDevice:
    """A driver that says there is a device, for callers that ask nothing else."""

    def __init__(self) -> None:
        raise RuntimeError("there is no device")

    @staticmethod
    def is_active() -> bool:
        return True


def hasten() -> None:
    """Skip the parts of launches that make no difference here: half of the interpreter's work."""
    from triton.language.core import dtype
    from triton.runtime import interpreter

    # Triton patches its language for each launch, and for each function call within one.
    interpreter._patch_lang = cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda scope: None
    # Tensors are on the host already. At each launch the interpreter writes whole storages over
    # themselves, as if it had copied them: for a K/V cache this takes longer than the kernel.
    interpreter.GridExecutor._init_args_hst = lambda executor, args, kwargs: (args, kwargs)
    interpreter.GridExecutor._restore_args_dev = lambda executor, *args: None
    # The interpreter looks up NumPy's name of a type for each load and store.
    of_numpy = interpreter._get_np_dtype
    known = cache(of_numpy)
    interpreter._get_np_dtype = lambda one: (known if type(one) is dtype else of_numpy)(one)
    # Compiled kernels do not check for overflow either.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )


def divide_as_gpus_do() -> None:
    """Multiply float32 by a rounded reciprocal, so that x / x may be less than 1."""
    from triton.runtime import interpreter

    def divide(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        if left.dtype != np.float32:
            return np.divide(left, right)
        with np.errstate(divide="ignore", invalid="ignore"):  # of rows that nobody reads
            return left * np.reciprocal(right)

    interpreter.InterpreterBuilder.create_fdiv = lambda builder, left, right: builder.binary_op(
        left, right, divide
    )


def queue_launches(device: Any) -> None:
    """Put each launch from now on in the current stream's queue (`device`: `build.load()`).

    Call after `hasten`.
    """
    import torch
    from triton.language.extra import cuda
    from triton.runtime import interpreter
    from triton.tools.tensor_descriptor import TensorDescriptor

    from emulated.races import watch_kernels

    # On sm_90 a kernel may start before the previous one has ended; here none does.
    cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None
    run = interpreter.GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        tensors: list[torch.Tensor] = []

        def aliased(arg: Any) -> Any:
            if isinstance(arg, tuple):
                made = [aliased(one) for one in arg]
                return type(arg)(*made) if hasattr(arg, "_fields") else tuple(made)
            if isinstance(arg, TensorDescriptor):
                return dataclasses.replace(arg, base=aliased(arg.base))
            if not isinstance(arg, torch.Tensor):
                return arg
            if not arg.is_cuda:  # the message of Triton's launcher
                raise ValueError(
                    f"Pointer argument cannot be accessed from Triton (cpu tensor?): {arg.shape}"
                )
            tensors.append(arg)
            return device.weak_host_alias(arg)

        of_host = tuple(map(aliased, args))
        named = {name: aliased(arg) for name, arg in kwargs.items()}

        def later() -> None:
            with torch._C.DisableTorchFunction():
                run(executor, *of_host, **named)

        name = getattr(executor.fn, "__name__", executor.fn)
        device.enqueue(f"Triton kernel {name}", later, tensors)

    interpreter.GridExecutor.__call__ = launch
    watch_kernels(interpreter, device)
