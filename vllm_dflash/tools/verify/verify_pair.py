"""The gate on the two engines of a pair, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from vllm_dflash.tools.engine_answers import EngineAnswers
from vllm_dflash.tools.engine_process import EngineProcess, temporary_logs
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.verify.gate import GateSettings, verify
from vllm_dflash.tools.verify.verification import Verification

OUR_PLUGIN = "dflash"


def verify_pair(
    target: str,
    speculative_config: dict[str, Any],
    prompts: list[str],
    settings: GateSettings | None = None,
    *,
    dtype: str | None = None,
    flags: tuple[str, ...] = (),
    logs: Path | None = None,
    progress: Progress | None = None,
) -> Verification:
    """`verify` on engines in processes of their own, one after the other; raises what that does.

    Args:
        target: folder or repository.
        speculative_config: as for `vllm serve`.
        prompts: what is continued.
        settings: (default: `GateSettings()`).
        dtype: of both engines.
        flags: of `vllm serve`, for both engines.
        logs: folder for the engines' logs; without one, only those of an engine that died are kept.
        progress: told what goes on.
    """
    open_engine = partial(open_side, target, flags=flags, dtype=dtype)
    with nullcontext(logs) if logs else temporary_logs("vllm-dflash-verify-") as folder:
        result = verify(
            prompts,
            partial(open_engine, speculative_config, folder / "dflash.log"),
            partial(open_engine, None, folder / "plain.log"),
            settings,
            progress,
        )
    result.about.update(target=target, speculative_config=speculative_config, flags=[*flags])
    return result


@contextmanager
def open_side(
    target: str,
    speculative_config: dict[str, Any] | None,
    log: Path,
    *,
    flags: Sequence[str] = (),
    dtype: str | None = None,
) -> Iterator[EngineAnswers]:
    """An engine with this speculative config; without one, and without our plugin, a plain one.

    Everything is as for `vllm serve`; the log is the engine's.

    Raises:
        ValueError: (also later) the engine refused its arguments.
        EngineDied: (also later) it did.
    """
    arguments: dict[str, Any] = {"flags": [*flags]}
    if dtype is not None:
        arguments["dtype"] = dtype
    if speculative_config:
        arguments["speculative_config"] = speculative_config
    else:
        arguments["environment"] = {"VLLM_PLUGINS": ",".join(other_plugins())}
    with EngineProcess(log, model=target, **arguments) as process:
        yield process.answers


def other_plugins() -> list[str]:
    """All plugins that this environment would load, but ours: platforms and models, maybe."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None:
        names = {*allowed.split(",")}
    else:
        entries = (one for package in distributions() for one in package.entry_points)
        names = {one.name for one in entries if one.group.startswith("vllm.")}
    return sorted(names - {OUR_PLUGIN})
