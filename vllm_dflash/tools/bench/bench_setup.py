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
from vllm_dflash.tools.bench.bench_runs import Cell, Comparison, read_early
from vllm_dflash.tools.bench.sides import CACHE_SIZE, Side, SideServers, make_sides
from vllm_dflash.tools.default_dtype import choose_dtype
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.prompts import read_prompts
from vllm_dflash.tools.server import flag_names

LEAST_PROMPTS, BATCHES = 4, 3
"""Prompts of a measurement, if the user does not say: at least, and for each request in flight."""


def compare_sides(parsed: argparse.Namespace, progress: Progress) -> Comparison:
    """Build the comparison of plain decoding, vLLM's own DFlash and ours.

    Raises:
        ValueError: the arguments do not fit each other, or prompts or models cannot be read.
    """
    check_concurrency(parsed)
    given = given_pair(parsed.target, parsed.drafter)
    if parsed.dataset_name is None and parsed.dataset_path is not None:
        raise ValueError("--dataset-path needs --dataset-name.")
    sources = {parsed.dataset_name: _set_flags(parsed)}
    if parsed.dataset_name is None:
        files = distinct(parsed.prompts or [parsed.demo / "held_out.jsonl"])
        texts = dict(zip(_file_names(files), map(read_prompts, files), strict=True))
        sources = {
            name: prompts_flags(prompts, parsed.out / "prompts" / f"{number}.jsonl")
            for number, (name, prompts) in enumerate(texts.items())
        }
    with progress.stage("preparing the pair"):
        pair = given or widened_demo(parsed.demo, parsed.out, positions=parsed.max_model_len)
        drafter = read_drafter(pair.drafter)
    progress.say(f"the pair: {pair.name}")
    cells = [
        one
        for name, flags in sources.items()
        for one in plan(parsed, name, [*flags, "--model", pair.target])
    ]
    read_early(cells[0])
    native_k = [k for k in sorted({*parsed.native_k}) if k <= drafter.max_draft_tokens]
    if drafter.num_candidates is not None and current_platform.is_cpu():
        progress.say("vLLM's own DFlash is left out: it does not support this drafter on CPUs")
        native_k = []
    sides = make_sides(pair.drafter, native_k, distinct(parsed.beside))
    # Prompts are repeated, unlike in production.
    flags = [*server_flags(parsed, progress, pair.target), "--no-enable-prefix-caching"]
    return build(parsed, progress, sides, cells, (pair.target, pair.name), flags)


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
            more += ["--output-len", str(parsed.output_len)] if parsed.output_len else []
            more += ["--ignore-eos"] * parsed.ignore_eos
            cells.append(Cell(load, count, (*flags, *more)))
    return cells


def prompts_flags(prompts: Iterable[str], file: Path) -> list[str]:
    """Write prompts to a file. Returns flags with which vLLM sends them as they are."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    return ["--dataset-name", "custom", "--dataset-path", str(file), "--skip-chat-template"]


def _set_flags(parsed: argparse.Namespace) -> list[str]:
    """Return flags for the set that the user named."""
    flags = ["--dataset-name", str(parsed.dataset_name)]
    flags += ["--dataset-path", parsed.dataset_path] if parsed.dataset_path else []
    flags += ["--skip-chat-template"] * parsed.skip_chat_template
    if parsed.chat_template_kwargs:
        flags += ["--chat-template-kwargs", json.dumps(parsed.chat_template_kwargs)]
    return flags


def server_flags(parsed: argparse.Namespace, progress: Progress, target: str) -> list[str]:
    """Return flags of every server, except for its share of the memory."""
    flags = ["--max-model-len", str(parsed.max_model_len)]
    flags += ["--max-num-seqs", str(parsed.max_num_seqs)]
    for name, value in choose_dtype(parsed.dtype, progress, target, parsed.flags).items():
        flags += [f"--{name}", value]
    return flags + parsed.flags


def build(
    parsed: argparse.Namespace,
    progress: Progress,
    sides: list[Side],
    cells: Sequence[Cell],
    model: tuple[str, str],
    flags: list[str],
    **servers: Any,
) -> Comparison:
    """Build the comparison of these sides.

    `model`: the target, and what runs, for reports. `servers`: more fields of `SideServers`.
    """
    target, name = model
    at_once = len(os.sched_getaffinity(0))
    if current_platform.is_cuda():
        share = parsed.gpu_memory_utilization / len(sides)
        flags = [*flags, "--gpu-memory-utilization", str(share)]
        if CACHE_SIZE not in flag_names(flags):
            at_once = 1  # an engine measures free memory while it starts
    about = describe(["vllm-dflash", *sys.argv[1:]], name, flags, cells)
    return Comparison(
        Record(about, sides, parsed.rounds),
        cells,
        SideServers(target, flags, at_once, parsed.out / "logs", **servers),
        parsed.out,
        progress,
        parsed.warmup_rounds,
    )


def describe(
    command: list[str], pair: str, flags: Sequence[str], cells: Sequence[Cell]
) -> dict[str, Any]:
    """Return what a reader needs to know about the results. `flags`: those of the servers."""
    preloaded = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    return {
        "command": shlex.join(command),
        "pair": pair,
        "flags": shlex.join(flags),
        "cells": [asdict(cell) for cell in cells],
        "versions": {},  # filled in by the servers
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "preloaded": [Path(library).name for library in preloaded],
    }


def cpu_name() -> str:
    """Return the CPU's name according to the system."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", info.read_text() if info.exists() else "", re.M)
    return found[1] if found else platform.processor() or "unknown"


def distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return each value once, in order."""
    return tuple(dict.fromkeys(values))


def _file_names(files: Sequence[Path]) -> tuple[str, ...]:
    """Return distinct names for the files: their stems if possible."""
    stems = [file.stem for file in files]
    is_clear = len({*stems}) == len(stems)
    return tuple(stems if is_clear else map(str, files))
