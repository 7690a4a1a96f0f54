"""Soak with random traffic and hang-ups for minutes, and compare texts with plain decoding's.

It looks for illegal accesses under load (vllm#55279, z-lab/dflash#146), texts that other requests
change, graphs that are captured and memory that is taken while serving.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from engine_child import EngineChild

from demo_models import DEMO, DFLASH, HELD_OUT
from gpu.gpu_machine import memory_of, telling_lines
from gpu.gpu_text import TIES
from vllm_dflash.tools.bench.sides import PLUGIN
from vllm_dflash.tools.completions import Request, complete, encode
from vllm_dflash.tools.prompts import read_prompts
from vllm_dflash.tools.server import EngineDied, Server
from vllm_dflash.tools.verify.divergence import Text, compare_all
from vllm_dflash.tools.verify.verify_command import plain_server

OTHERS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"repetition_penalty": 1.3},
    {"logprobs": 1},
    {"ignore_eos": True},
    {"temperature": 0.7, "top_p": 0.9, "seed": 5},  # the last one: no interpreter runs its kernel
)
NEVER = ("captures_after_warmup", "reallocations_after_warmup", "nan_drafts")
"""Our counters that must stay 0."""
MOST_GROWTH = 256
"""MiB of the GPU that both engines use, from the first measurement to the last."""
SECONDS_AT_A_TIME = 15.0
"""Seconds between two writes of the results."""


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Settings of both engines: compiled, with graphs, and so few blocks that they preempt."""
    found: dict[str, Any] = {"dtype": options.dtype, "seed": 0}
    found |= {"max_model_len": 512, "max_num_seqs": options.most}
    if options.backend:
        found["attention_config"] = {"backend": options.backend}
    if options.tiny:
        return found | {"enforce_eager": True, "max_model_len": 256}
    # Two engines start at the same time, so neither may ask how much memory is left.
    found |= {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 1 << 30}
    return found | {"num_gpu_blocks_override": 200}


def flags(settings: dict[str, Any]) -> list[str]:
    """Return these settings as flags of `vllm serve`."""
    found = []
    for name, value in settings.items():
        found.append(f"--{name.replace('_', '-')}")
        if value is not True:
            found.append(value if isinstance(value, str) else json.dumps(value))
    return found


def soak(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Fill `found` with results, and write it repeatedly."""
    log = options.file.parents[1] / "log" / f"{options.file.stem}-engine.log"
    asked = read_prompts(HELD_OUT, 2 if options.tiny else 40)
    tokens = (2, 8) if options.tiny else (3, 24, 64, 128)
    engine, target = settings(options), str(DEMO / "target")
    with (
        plain_server(
            log.with_name(f"{options.file.stem}-plain.log"), target, flags(engine)
        ) as plain,
        EngineChild(
            log,
            "gpu.random_traffic:SoakedEngine.start",
            environment={"VLLM_PLUGINS": PLUGIN},
            model=target,
            speculative_config=DFLASH,
            disable_log_stats=False,
            **engine,
        ) as ours,
    ):
        plain.wait()
        prompts = encode(plain, asked)
        requests = [Request(prompt, max(tokens)) for prompt in prompts]
        texts = [tuple(one.tokens) for one in complete(plain, requests, options.most)]
        facts = ours.facts()
        memory: list[int] = []
        begun, seed = time.monotonic(), options.seed
        while (left := options.seconds - (time.monotonic() - begun)) > 0:
            told = ours.traffic(
                prompts=prompts,
                tokens=tokens,
                others=OTHERS[:-1] if options.tiny else OTHERS,
                most=options.most,
                seed=seed,
                seconds=min(left, SECONDS_AT_A_TIME),
            )
            seed += 1
            memory += memory_of({one.pid for one in psutil.Process().children(recursive=True)})
            found |= {"seen": told["seen"], "seconds": time.monotonic() - begun}
            found |= {"gpu_memory_mib": " ".join(map(str, memory[-1:])), "log": telling_lines(log)}
            tell(options.file, found)
        told = ours.settle()
        found |= {"seen": told["seen"], "stats": ours.dflash_stats()[0]}
        found["differ"] = differences(plain, prompts, texts, told["texts"], facts, options)
        found["texts"] = len(told["texts"])
        found["growth"] = memory[-1] - memory[0] if memory else None
        tell(options.file, found)


def differences(
    plain: Server,
    prompts: list[list[int]],
    texts: list[tuple[int, ...]],
    written: list[Any],
    facts: Any,
    options: argparse.Namespace,
) -> list[str]:
    """Return a line for each place where a text leaves plain decoding's, except near-ties."""
    compared = [
        Text(tuple(prompts[number]), texts[number][:limit], tuple(tokens), limit)
        for number, limit, tokens in written
    ]
    ask = partial(complete, plain, concurrency=options.most)
    diverged = compare_all(compared, {*facts["stop_tokens"]}, ask)
    tie = TIES[options.dtype]
    return [
        f"prompt {number}, {limit} tokens, position {one.position}: {one.regret:.3g} nat"
        for (number, limit, _), ones in zip(written, diverged, strict=True)
        for one in ones
        if not one.is_tie(tie)
    ]


def faults(found: dict[str, Any]) -> list[str]:
    """Say in words what did not hold."""
    stats = found.get("stats", {})
    wrong = [f"{name.replace('_', ' ')}: {stats[name]}" for name in NEVER if stats.get(name)]
    wrong += [f"{len(found['differ'])} divergences"] if found.get("differ") else []
    grown = found.get("growth") or 0
    return wrong + ([f"{grown} MiB more on the GPU"] if grown > MOST_GROWTH else [])


def tell(file: Path, found: dict[str, Any], died: str = "") -> None:
    """Write the results so far."""
    seen = found.get("seen", {})
    events = ", ".join(f"{seen.get(one, 0)} {one}" for one in ("served", "hung up", "preempted"))
    words = [f"{found.get('seconds', 0):.0f} s", events, *faults(found)]
    if found.get("growth", 0) is None:
        words.append("how much memory it takes is not known")
    if died:
        words.append(died)
    file.write_text(json.dumps(found | {"verdict": "; ".join(words)}, indent=1))


def main() -> int:
    """Soak, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--dtype", choices=TIES, required=True)
    add("--backend", default="")
    add("--seconds", type=float, required=True)
    add("--seed", type=int, default=1)
    add("--tiny", action="store_true")
    add("file", type=Path)
    options = parser.parse_args()
    options.most = 2 if options.tiny else 32
    found: dict[str, Any] = {}
    try:
        soak(options, found)
    except (EngineDied, ValueError) as error:
        print(error, file=sys.stderr)
        tell(options.file, found, f"died: {' '.join(str(error).split())[:200]}")
        return 1
    return 1 if faults(found) or not found["seen"].get("served") else 0


if __name__ == "__main__":
    sys.exit(main())
