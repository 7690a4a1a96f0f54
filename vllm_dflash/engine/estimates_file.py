"""An engine's estimates on disk, for the next start of the same kind of engine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform

from vllm_dflash import __version__
from vllm_dflash.config.mode import Mode
from vllm_dflash.engine.agreement import from_rank_0
from vllm_dflash.engine.reporting.log import logger
from vllm_dflash.planning.ahead import AheadPlanner
from vllm_dflash.planning.estimates import Estimates, EstimatesError
from vllm_dflash.planning.planner import Planner

SCHEMA = 5
"""Version of the format. Increase it when the content, or its meaning, changes."""
INTERVAL = 60.0
"""Minimum seconds between two writes."""
LEAST_STEPS = 100
"""Minimum steps between two writes: fewer teach next to nothing."""
CPU_INFO = Path("/proc/cpuinfo")


def device_name() -> str:
    """Name of the hardware that times depend on: the GPU, or the CPU and its number of threads."""
    if not current_platform.is_cpu():
        return current_platform.get_device_name()
    try:
        found = re.search(r"^model name\s*: (.*)$", CPU_INFO.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return f"{found[1] if found else platform.machine()}, {torch.get_num_threads()} threads"


def engine_key(vllm_config: VllmConfig) -> dict[str, Any]:
    """All settings that estimates depend on: engines with equal keys can share a file."""
    mode = Mode.of(vllm_config)
    target, draft = vllm_config.model_config, vllm_config.speculative_config
    assert draft is not None
    return {
        "vllm": vllm.__version__,
        "vllm_dflash": __version__,
        "target": target.model,
        "target_revision": target.revision,
        "quantization": str(target.quantization),
        "dtype": str(target.dtype),
        "enforce_eager": target.enforce_eager,
        "drafter": mode.drafter.model,
        "drafter_revision": draft.revision,
        # Includes the runner, K, and the drafter's config.
        "options": json.loads(replace(mode, estimates_folder=None).to_json()),
        "max_num_seqs": vllm_config.scheduler_config.max_num_seqs,
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "async_scheduling": bool(vllm_config.scheduler_config.async_scheduling),
        "device": device_name(),
        **({} if vllm_config.lora_config is None else {"enable_lora": True}),
    }


@dataclass(frozen=True)
class EstimatesFile:
    """The file of one kind of engine. Several engines may share it; the last write counts."""

    folder: str
    key: dict[str, Any]
    recalled: Estimates | None = None
    """Content when this engine started; None if there was none or it was unusable."""

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> EstimatesFile | None:
        """The file of a worker's engine; None if the user has not asked for one.

        Rank 0 reads it for all ranks: other machines may not have the file.
        """
        mode = Mode.of(vllm_config)
        if mode.estimates_folder is None:
            return None
        file = cls(mode.estimates_folder, engine_key(vllm_config))
        sizes = mode.draft_width, vllm_config.scheduler_config.max_num_seqs
        is_first = get_tensor_model_parallel_rank() == 0
        return replace(file, recalled=from_rank_0(file.read(*sizes) if is_first else None))

    @property
    def path(self) -> Path:
        """Path of the file, named after the models, for people, and a hash of `key`."""
        names = "_".join(Path(self.key[name]).name for name in ("target", "drafter"))
        readable = re.sub(r"[^\w.-]", "-", names)[:100]
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        return Path(self.folder) / f"{readable}-{digest[:16]}.json"

    def read(self, max_draft: int, max_requests: int) -> Estimates | None:
        """Estimates in the file; None if it is missing or unusable, and the log says why."""
        try:
            written = json.loads(self.path.read_text())
            if not isinstance(written, dict) or written.get("schema") != SCHEMA:
                raise EstimatesError("it was written by another version")
            if written.get("key") != self.key:
                raise EstimatesError("it is of another engine")
            return Estimates.from_dict(written.get("estimates"), max_draft, max_requests)
        except FileNotFoundError:
            logger().info("estimates of costs and acceptance will be kept in %s", self.path)
        except (OSError, ValueError, RecursionError) as error:
            logger().warning("%s is not used, and will be replaced: %s", self.path, error)
        return None

    def write(self, estimates: dict[str, Any]) -> None:
        """Replace the whole file at once, so that nobody reads half a file. Raises `OSError`."""
        written = {"schema": SCHEMA, "key": self.key, "estimates": estimates}
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{uuid.uuid4().hex}")
        try:
            part.write_text(json.dumps(written))
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


class EstimatesKeeper:
    """Starts a planner from the file, and writes back what it learns: regularly, and at the end."""

    def __init__(
        self,
        file: EstimatesFile,
        planner: Planner | AheadPlanner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._planner = planner
        self._clock = clock
        if file.recalled is None:  # write soon: the next start need not measure again
            self._due, self._steps = clock(), LEAST_STEPS
        else:
            planner.recall(file.recalled)
            self._due, self._steps = clock() + INTERVAL, 0
        self._writer: threading.Thread | None = None
        self._has_failed = False

    def tick(self) -> None:
        """Call after each step. Writes when due, in a thread: no step waits for the disk."""
        self._steps += 1
        if self._steps < LEAST_STEPS or self._clock() < self._due:
            return
        if self._writer is not None and self._writer.is_alive():
            return
        self._due, self._steps = self._clock() + INTERVAL, 0
        learned = self._planner.estimates().to_dict()
        self._writer = threading.Thread(target=self._write, args=(learned,), daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Wait for a running write, then write what is new. Call when the engine ends."""
        if self._writer is not None:
            self._writer.join()
        if self._steps >= LEAST_STEPS:
            self._steps = 0
            self._write(self._planner.estimates().to_dict())

    def _write(self, estimates: dict[str, Any]) -> None:
        try:
            self._file.write(estimates)
        except OSError as error:
            if not self._has_failed:
                said = "estimates cannot be written to %s, will try again: %s"
                logger().warning(said, self._file.path, error)
            self._has_failed = True
            return
        if self._has_failed:
            logger().info("estimates are written to %s again", self._file.path)
        self._has_failed = False
