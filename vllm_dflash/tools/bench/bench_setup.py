"""Sets up a comparison from the arguments of `vllm-dflash bench`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from vllm_dflash.checkpoint.read import read_drafter
from vllm_dflash.tools.bench.bench_pair import given_pair, widened_demo
from vllm_dflash.tools.bench.bench_result import Record
from vllm_dflash.tools.bench.bench_runs import Cell, Comparison, parse_client_flags, read_early
from vllm_dflash.tools.bench.sides import CACHE_SIZE, Side, make_sides
from vllm_dflash.tools.default_dtype import with_dtype
from vllm_dflash.tools.demo_files import demo_folder
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.prompts import read_prompts
from vllm_dflash.tools.server import as_vllm_spells, flag_names

LEAST_PROMPTS, BATCHES = 4, 3
"""Prompts of a measurement, if the user does not say: at least, and for each request in flight."""


def compare_sides(parsed: argparse.Namespace, progress: Progress) -> Comparison:
    """Build the comparison of plain decoding, vLLM's own DFlash and ours.

    Raises:
        ValueError: the arguments do not fit each other, or prompts or models cannot be read.
    """
    check_concurrency(parsed)
    parse_client_flags(parsed.client_flags)  # a wrong one ends the process here
    given = given_pair(parsed.target, parsed.drafter)
    sources = {parsed.dataset_name: ["--dataset-name", str(parsed.dataset_name)]}
    if parsed.dataset_name is None:
        files = distinct(parsed.prompts or [demo_folder() / "held_out.jsonl"])
        stems = [file.stem for file in files]
        names = stems if len({*stems}) == len(stems) else map(str, files)
        texts = dict(zip(names, map(read_prompts, files), strict=True))
        sources = {
            name: prompts_flags(prompts, parsed.out / "prompts" / f"{number}.jsonl")
            for number, (name, prompts) in enumerate(texts.items())
        }
    with progress.stage("preparing the pair"):
        pair = given or widened_demo(demo_folder(), parsed.out, positions=parsed.max_model_len)
        drafter = read_drafter(pair.drafter)
    progress.say(f"the pair: {pair.name}")
    of_model = ["--model", pair.target, *client_flags(parsed.flags)]
    cells = [
        one
        for name, flags in sources.items()
        for one in plan(parsed, name, [*flags, *of_model, *parsed.client_flags])
    ]
    read_early(cells[0])
    most, asked = drafter.max_draft_tokens, sorted({*parsed.native_k})
    native_k = [k for k in asked if k <= most]
    if native_k != asked:
        progress.say(f"native K above {most} is left out: the drafter proposes up to {most} tokens")
    if drafter.num_candidates is not None and current_platform.is_cpu():
        progress.say("vLLM's own DFlash is left out: it does not support this drafter on CPUs")
        native_k = []
    sides = make_sides(pair.drafter, native_k, distinct(parsed.beside))
    comparison = build(parsed, progress, sides, cells, pair.target, pair.name)
    comparison.flags.append("--no-enable-prefix-caching")  # prompts repeat, unlike in production
    return comparison


def check_concurrency(parsed: argparse.Namespace) -> None:
    """Check that servers take all requests at a time. Raises ValueError."""
    if max(parsed.concurrency) > parsed.max_num_seqs:
        raise ValueError(
            f"there are up to {max(parsed.concurrency)} requests in flight, but the servers take"
            f" {parsed.max_num_seqs} at a time: raise --max-num-seqs."
        )


def plan(parsed: argparse.Namespace, name: str, flags: Sequence[str]) -> list[Cell]:
    """Plan the cells of a source of prompts: at each temperature, each number in flight."""
    cells = []
    for temperature in distinct(parsed.temperature):
        load = f"{name}, temperature {temperature:g}" if temperature else name
        for count in distinct(parsed.concurrency):
            prompts = parsed.num_prompts or max(LEAST_PROMPTS, BATCHES * count)
            more = ["--temperature", str(temperature), "--num-prompts", str(prompts)]
            if parsed.output_len:
                more += ["--output-len", str(parsed.output_len)]
                # The only set for which vLLM ignores the general flag.
                more += ["--speed-bench-output-len", str(parsed.output_len)]
            cells.append(Cell(load, count, (*flags, *more)))
    return cells


def prompts_flags(prompts: Iterable[str], file: Path) -> list[str]:
    """Write prompts to a file. Returns flags with which vLLM sends them as they are."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    return ["--dataset-name", "custom", "--dataset-path", str(file), "--skip-chat-template"]


def client_flags(flags: Sequence[str]) -> list[str]:
    """Return flags for the client that follow from those of `vllm serve`: tokenizer and name."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--tokenizer")
    parser.add_argument("--tokenizer-mode")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--served-model-name", nargs="+")
    known, _ = parser.parse_known_args([as_vllm_spells(flag) for flag in flags])
    found = ["--trust-remote-code"] * known.trust_remote_code
    for name, value in (
        ("--tokenizer", known.tokenizer),
        ("--tokenizer-mode", known.tokenizer_mode),
        ("--served-model-name", known.served_model_name and known.served_model_name[0]),
    ):
        found += [name, value] if value else []
    return found


def build(
    parsed: argparse.Namespace,
    progress: Progress,
    sides: list[Side],
    cells: list[Cell],
    target: str,
    name: str,
) -> Comparison:
    """Build the comparison of these sides of a target; reports call it `name`."""
    flags = ["--max-model-len", str(parsed.max_model_len)]
    flags += ["--max-num-seqs", str(parsed.max_num_seqs)]
    flags += with_dtype(parsed.dtype, progress, target, parsed.flags)
    at_once = len(os.sched_getaffinity(0))
    if current_platform.is_cuda():
        flags += ["--gpu-memory-utilization", str(parsed.gpu_memory_utilization / len(sides))]
        if CACHE_SIZE not in flag_names(flags):
            at_once = 1  # an engine measures free memory while it starts
    record = Record(describe(["vllm-dflash", *sys.argv[1:]], name, cells), sides, parsed.rounds)
    out, rounds = parsed.out, parsed.warmup_rounds
    return Comparison(record, cells, target, flags, out, progress, at_once, rounds)


def describe(command: list[str], pair: str, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return what a reader needs to know about the results."""
    preloaded = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"^model name\s*: (.*)$", info.read_text() if info.exists() else "", re.M)
    return {
        "command": shlex.join(command),
        "pair": pair,
        "cells": [asdict(cell) for cell in cells],
        "versions": {},  # filled in by the servers
        "cpu": cpu[1] if cpu else platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "preloaded": [Path(library).name for library in preloaded],
    }


def distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return each value once, in order."""
    return tuple(dict.fromkeys(values))
