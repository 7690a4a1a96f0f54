"""Model Runner V2 with draft trees on several ranks, in the interpreter: what each rank grows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import pytest
import torch

from support import importing_support
from support.interpreter import triton_attention

AT_START = "from support.interpreter import use_model_runner_v2\nuse_model_runner_v2()\n"
"""Runs first in every process, before vLLM is imported there."""


@contextmanager
def interpreting_ranks(folder: Path) -> Iterator[None]:
    """Let engines that start inside have several ranks, whose targets use vLLM's attention kernel
    for GPUs; `folder` is for a file."""
    (folder / "sitecustomize.py").write_text(AT_START)
    there = [str(folder), importing_support()["PYTHONPATH"]]
    with pytest.MonkeyPatch.context() as patch, triton_attention():
        patch.setenv("PYTHONPATH", os.pathsep.join(there))
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


class Grower:
    """Methods of every worker of an engine (`worker_extension_cls`)."""

    drafter: Any

    def watch(self) -> bool:
        """Write down what is grown from now on. Return whether drafts are trees."""
        trees = self.drafter.trees
        self.grown: list[Any] = []
        grow = trees.grow

        def watched(slots: Any, batch: Any, *others: Any, **more: Any) -> None:
            grow(slots, batch, *others, **more)
            of_slots = trees.slots
            parts = of_slots.sizes, of_slots.tokens, of_slots.parents, batch.newest
            self.grown.append([part[batch.slots].tolist() for part in parts])

        trees.grow = watched
        return bool(trees.is_attached)

    def written_down(self) -> tuple[list[Any], torch.Tensor]:
        """Return tree and last token of each request, step by step, and all that was learned."""
        slots = self.drafter.slots
        return self.grown, torch.cat([slots.overall.flatten(), slots.records.flatten()])


if parent_process() is not None:  # a rank, which is going to load the target
    for_good = triton_attention()
    for_good.__enter__()
