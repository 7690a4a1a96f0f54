"""Sets up a comparison from the arguments of `python benchmarks/loads`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.platforms import current_platform

from loads.answers import START, importing_benchmarks
from loads.comparison import LoadsComparison
from loads.report import LoadsRecord
from loads.step_times import TIMED
from loads.workload import AGENT, CLOSED_LOADS, TURN, LoadsWorkload
from vllm_dflash.tools.bench.bench_pair import Pair, given_pair, widened_demo
from vllm_dflash.tools.bench.bench_setup import BenchSetup, distinct
from vllm_dflash.tools.bench.widen import WIDE_DRAFTER, WIDE_TARGET

TRAINED_ON = 512
"""Tokens per sequence in the training of the demo pair."""


class LoadsSetup(BenchSetup):
    """Builds a comparison under any of the loads."""

    program = ("python", "benchmarks/loads")
    record_class, comparison_class = LoadsRecord, LoadsComparison
    workload: LoadsWorkload

    @property
    def more_engines(self) -> int:
        """One for the tuned schedule, which starts later than the others."""
        return int(self.parsed.native_schedule == "tuned")

    def comparison(self) -> LoadsComparison:
        """Build the comparison."""
        made = super().comparison()
        assert isinstance(made, LoadsComparison)
        has_native = any(side.kind == "native" for side in made.record.sides)
        made.tune_schedule = bool(self.more_engines) and has_native
        return made

    def choose_workload(self) -> LoadsWorkload:
        """Make the workload."""
        parsed = self.parsed
        common = {**vars(super().choose_workload())}
        if parsed.dataset_name is None:
            common["loads"] = () if parsed.context else distinct(parsed.load)
        return LoadsWorkload(
            **common,
            phases=tuple(parsed.phases),
            contexts=distinct(parsed.context or ()),
            shares=distinct(parsed.shares),
            turns=parsed.turns,
            where=parsed.where,
        )

    def check(self) -> None:
        """Check that the engines can run the workload."""
        workload, parsed = self.workload, self.parsed
        others = {*(workload.loads or ["--context"])} - {*CLOSED_LOADS}
        if others and not parsed.dataset_name and any(workload.temperatures):
            raise ValueError(
                f"--temperature is for {', '.join(CLOSED_LOADS)} and sets of prompts, not for"
                f" {', '.join(sorted(others))}."
            )
        super().check()
        if parsed.native_schedule == "tuned" and parsed.dataset_name:
            raise ValueError("--native-schedule tuned is for loads, not for sets of prompts.")
        if workload.where and current_platform.is_cuda():
            raise ValueError(
                "--where does not work on a GPU, where calls return before their work is done: use"
                " vLLM's profiler (--profiler-config), or leave --where out."
            )
        if workload.where and parsed.dataset_name:
            raise ValueError("--where is for loads and contexts, not for sets of prompts.")

    @property
    def max_model_len(self) -> int:
        """Maximum tokens per request in every engine, with room for all contexts and turns."""
        workload = self.workload
        contexts = [*workload.contexts, *([TURN * workload.turns] * (AGENT in workload.loads))]
        return max([super().max_model_len, *map(workload.room_for, contexts)])

    def choose_pair(self) -> Pair:
        """Return the user's pair or a copy of the demo pair, perhaps with a random drafter."""
        parsed = self.parsed
        pair = given_pair(parsed.target, parsed.drafter)
        if pair is None:
            wide = (None, None) if parsed.as_it_is else (WIDE_TARGET, WIDE_DRAFTER)
            pair = widened_demo(parsed.demo, parsed.out, wide[0], wide[1], self.max_model_len)
            if max(self.workload.contexts, default=0) > TRAINED_ON:
                beyond = f"trained on {TRAINED_ON} tokens at a time: beyond, texts and drafts are"
                pair = replace(pair, name=f"{pair.name}; {beyond} noise")
        elif parsed.as_it_is:
            raise ValueError("--as-it-is is for the demo pair; other pairs are never widened.")
        return with_random_drafter(pair, parsed.out) if parsed.random_drafter else pair

    def engine_arguments(self, target: str) -> dict[str, Any]:
        """Return vLLM's arguments of every engine, except for its share of the memory."""
        engine = super().engine_arguments(target)
        if self.workload.contexts or AGENT in self.workload.loads:
            engine["enable_prefix_caching"] = True
        if self.workload.where:
            engine["worker_extension_cls"] = TIMED
        return engine

    def process_arguments(self) -> dict[str, Any]:
        """Return arguments of every engine's process."""
        return {"start": START, "environment": importing_benchmarks()}


def with_random_drafter(pair: Pair, out: Path) -> Pair:
    """Replace the pair's drafter by a copy with random weights, whose drafts are useless."""
    source, goal = Path(pair.drafter), out / "random_drafter"
    if not source.is_dir():
        raise ValueError(f"--random-drafter needs the drafter in a folder; {source} is not one.")
    shutil.rmtree(goal, ignore_errors=True)  # a copy of another drafter may have other files
    shutil.copytree(source, goal)
    generator = torch.Generator().manual_seed(0)
    for file in sorted(goal.glob("*.safetensors")):
        noise = {
            name: torch.ones_like(tensor)
            if "norm" in name
            else torch.randn(tensor.shape, generator=generator).mul(0.02).to(tensor.dtype)
            for name, tensor in load_file(file).items()
        }
        save_file(noise, file, metadata={"format": "pt"})
    return replace(pair, drafter=str(goal), name=f"{pair.name}, random drafter")
