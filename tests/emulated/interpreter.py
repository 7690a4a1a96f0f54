"""Triton's interpreter without a device: made faster, with its launches queued."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def worst_arithmetic() -> Iterator[None]:
    """Compute inside as badly as a GPU may: exponentials and logarithms are off by a bit, products
    are not rounded before a sum, sums and maxima go by halves, and NaN loses to any number, or
    wins, by its place.

    The same numbers always give the same result, as on a GPU.
    """
    from triton.language import standard
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, ReduceOps

    def multiply(builder: Any, left: Any, right: Any) -> Any:
        made = builder.binary_op(left, right, np.multiply)
        if made.data.dtype == np.float32:
            made.product = left.data.astype(np.float64) * right.data
        return made

    def add(sign: int) -> Callable[..., Any]:
        def added(builder: Any, left: Any, right: Any) -> Any:
            made = builder.binary_op(left, right, np.add if sign > 0 else np.subtract)
            exact = [getattr(one, "product", one.data) for one in (left, right)]
            if made.data.dtype == np.float32 and any(one.dtype == np.float64 for one in exact):
                whole = exact[0] + sign * exact[1].astype(np.float64)
                made.data = np.asarray(whole, np.float32)
            return made

        return added

    def off(compute: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda builder, arg: builder.unary_op(arg, lambda data: _off(compute, data))

    apply = ReduceOps.apply_impl

    def reduce(ops: Any, given: Any) -> Any:
        data = given[0].handle.data
        if ops.combine_fn is standard._sum_combine and data.dtype == np.float32:
            return ops.to_tensor(_by_halves(ops, np.add, data), given[0].dtype)
        if ops.combine_fn is standard._argmax_combine_tie_break_left:
            value, place = _argmax_by_halves(ops, data)
            return ops.to_tensor(value, given[0].dtype), ops.to_tensor(place, given[1].dtype)
        return apply(ops, given)

    patched = {
        "create_fmul": multiply,
        "create_fadd": add(1),
        "create_fsub": add(-1),
        "create_exp": off(lambda data: np.exp2(data * np.log2(np.e).astype(data.dtype))),
        "create_exp2": off(np.exp2),
        "create_log": off(np.log),
    }
    before = {name: getattr(InterpreterBuilder, name) for name in patched}
    for name, made in patched.items():
        setattr(InterpreterBuilder, name, made)
    interpreter.ReduceOps.apply_impl = reduce
    try:
        yield
    finally:
        for name, made in before.items():
            setattr(InterpreterBuilder, name, made)
        interpreter.ReduceOps.apply_impl = apply


def _off(compute: Callable[[Any], Any], data: np.ndarray) -> np.ndarray:
    """Compute, up to one unit in the last place too high or too low; 0 and 1 stay."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        found = np.asarray(compute(data))
    if found.dtype != np.float32:
        return found
    mixed = np.asarray(data, np.float32).view(np.uint32) * np.uint32(2654435761)
    toward = np.where(mixed >> 31, np.float32(np.inf), np.float32(-np.inf))
    stays = ~np.isfinite(found) | (found == 0) | (found == 1) | ((mixed >> 30) & 1 == 0)
    return np.where(stays, found, np.nextafter(found, toward))


def _halves(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    middle = data.shape[0] // 2
    return data[:middle], data[middle:]


def _by_halves(ops: Any, combine: Callable[..., Any], data: np.ndarray) -> np.ndarray:
    """Reduce along the axis: the first half with the second, until one is left."""
    left = data.reshape(-1) if ops.axis is None else np.moveaxis(data, ops.axis, 0)
    while len(left) > 1:
        left = combine(*_halves(left))
    return _shaped(ops, left[0], data)


def _argmax_by_halves(ops: Any, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same for Triton's maximum with its place, whose comparisons with NaN are false."""
    value = data.reshape(-1) if ops.axis is None else np.moveaxis(data, ops.axis, 0)
    place = np.arange(len(value), dtype=np.int32).reshape(-1, *[1] * (value.ndim - 1))
    place = np.broadcast_to(place, value.shape)
    while len(value) > 1:
        (first, second), (at, at_second) = _halves(value), _halves(place)
        wins = (first > second) | ((first == second) & (at < at_second))
        value, place = np.where(wins, first, second), np.where(wins, at, at_second)
    return _shaped(ops, value[0], data), _shaped(ops, place[0], data)


def _shaped(ops: Any, found: np.ndarray, data: np.ndarray) -> np.ndarray:
    if not ops.keep_dims:
        return found
    return np.expand_dims(found, tuple(range(data.ndim)) if ops.axis is None else ops.axis)
