"""The two engines of the gate, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from vllm_dflash.tools.engine_answers import EngineAnswers
from vllm_dflash.tools.engine_process import EngineProcess

OUR_PLUGIN = "dflash"


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
