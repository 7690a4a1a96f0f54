"""Sets up a comparison from the arguments of `vllm-dflash bench`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from vllm_dflash.checkpoint.read import read_drafter
from vllm_dflash.tools.bench.bench_datasets import Dataset, given_dataset
from vllm_dflash.tools.bench.bench_pair import Pair, given_pair, widened_demo
from vllm_dflash.tools.bench.bench_plan import CLOSED, Workload
from vllm_dflash.tools.bench.bench_record import Record, describe
from vllm_dflash.tools.bench.comparison import Comparison
from vllm_dflash.tools.bench.sides import Side, SideEngines, make_sides
from vllm_dflash.tools.default_dtype import choose_dtype
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.prompts import read_prompts


class BenchSetup:
    """Builds the comparison that a user asked for. Subclasses make one of other parts.

    What is made raises ValueError for arguments that do not fit each other.
    """

    record_class: type[Record] = Record
    workload: Workload

    def __init__(self, parsed: argparse.Namespace, progress: Progress) -> None:
        self.parsed, self.progress = parsed, progress
        self.workload = self.choose_workload()
        self.check()

    def choose_workload(self) -> Workload:
        """Make the workload."""
        parsed = self.parsed
        return Workload(
            loads=(CLOSED,) if parsed.dataset_name is None else (),
            concurrency=distinct(parsed.concurrency),
            tokens=parsed.tokens,
            seconds=parsed.seconds,
            temperatures=distinct(parsed.temperature),
            ignore_eos=parsed.ignore_eos,
            files=_file_names(distinct(parsed.prompts or [])),
        )

    def check(self) -> None:
        """Check that the engines can run the workload."""
        if self.workload.highest_concurrency > self.parsed.max_num_seqs:
            raise ValueError(
                f"the loads have up to {self.workload.highest_concurrency} requests in flight, but"
                f" the engines take {self.parsed.max_num_seqs} at a time: raise --max-num-seqs."
            )

    @property
    def max_model_len(self) -> int:
        """Maximum tokens per request in every engine."""
        return self.parsed.max_model_len

    def choose_pair(self) -> Pair:
        """Return the user's pair, or a widened copy of the demo pair."""
        parsed = self.parsed
        pair = given_pair(parsed.target, parsed.drafter)
        return pair or widened_demo(parsed.demo, parsed.out, positions=self.max_model_len)

    def engine_arguments(self, target: str) -> dict[str, Any]:
        """Return vLLM's arguments of every engine, except for its share of the memory."""
        parsed = self.parsed
        engine: dict[str, Any] = {
            "model": target,
            "max_model_len": self.max_model_len,
            "max_num_seqs": parsed.max_num_seqs,
            "enable_prefix_caching": False,  # because prompts are repeated, unlike in production
            **choose_dtype(parsed.dtype, self.progress, target),
        }
        if parsed.enforce_eager:
            engine["enforce_eager"] = True
        if parsed.tensor_parallel_size > 1:
            engine["tensor_parallel_size"] = parsed.tensor_parallel_size
        if parsed.kv_cache_memory_bytes is not None:
            engine["kv_cache_memory_bytes"] = parsed.kv_cache_memory_bytes
        return engine

    def process_arguments(self) -> dict[str, Any]:
        """Return arguments of every engine's process."""
        return {}

    def comparison(self) -> Comparison:
        """Build the comparison."""
        parsed, progress = self.parsed, self.progress
        dataset = given_dataset(parsed)
        if dataset is None:
            files = distinct(parsed.prompts or [parsed.demo / "held_out.jsonl"])
            prompts = dict(zip(self.workload.files, map(read_prompts, files), strict=True))
        else:
            prompts = {"": [str(one.prompt) for one in dataset.requests]}
        parsed.out.mkdir(parents=True, exist_ok=True)
        with progress.stage("preparing the pair"):
            pair = self.choose_pair()
            drafter = read_drafter(pair.drafter)
        progress.say(f"the pair: {pair.name}")
        native_k = [k for k in sorted({*parsed.native_k}) if k <= drafter.max_draft_tokens]
        if drafter.num_candidates is not None and current_platform.is_cpu():
            progress.say("vLLM's own DFlash is left out: it does not support this drafter on CPUs")
            native_k = []
        sides = make_sides(pair.drafter, native_k, distinct(parsed.beside))
        return self.build(sides, pair.target, pair.name, prompts, dataset)

    def build(
        self,
        sides: list[Side],
        target: str,
        name: str,
        prompts: dict[str, list[str]],
        dataset: Dataset | None = None,
    ) -> Comparison:
        """Build the comparison of these sides. `name`: what runs, for reports."""
        parsed = self.parsed
        engine = self.engine_arguments(target)
        at_once = max(1, len(os.sched_getaffinity(0)) // parsed.tensor_parallel_size)
        if current_platform.is_cuda():
            engine["gpu_memory_utilization"] = parsed.gpu_memory_utilization / len(sides)
            if parsed.kv_cache_memory_bytes is None:
                at_once = 1  # an engine measures free memory while it starts
        about = describe(["vllm-dflash", *sys.argv[1:]], name, engine, self.workload)
        return Comparison(
            self.record_class(about, sides, parsed.rounds),
            self.workload,
            prompts,
            SideEngines(engine | self.process_arguments(), at_once, parsed.out / "logs"),
            parsed.out,
            self.progress,
            warmup_rounds=parsed.warmup_rounds,
            dataset=dataset,
        )


def distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return each value once, in order."""
    return tuple(dict.fromkeys(values))


def _file_names(files: Sequence[Path]) -> tuple[str, ...]:
    """Return distinct names for the files: their stems if possible; empty for a single file."""
    if len(files) < 2:
        return ("",)
    stems = [file.stem for file in files]
    is_clear = len({*stems}) == len(stems)
    return tuple(stems if is_clear else map(str, files))
