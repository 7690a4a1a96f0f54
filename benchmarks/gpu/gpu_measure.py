"""One engine of the bench in its own process, because a GPU cannot hold two large ones."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from engine_child import EngineChild

from demo_models import DEMO, HELD_OUT
from gpu.gpu_machine import ask_gpu
from gpu.gpu_models import models_folder
from gpu.gpu_sizes import ADAPTIVE, SIZES, TINY, Load, Size, side_of
from vllm_dflash.tools.bench.bench_pair import widened_demo
from vllm_dflash.tools.bench.sides import PLUGIN
from vllm_dflash.tools.prompts import read_prompts
from vllm_dflash.tools.server import EngineDied

TELLING = re.compile(
    r"vllm-dflash \S+ is active.*|draft lengths .*|Using \S+ (?:attention )?backend.*|"
    r"Model loading took.*|Available KV cache memory.*|KV cache size.*|"
    r"Graph capturing finished.*|CUDA graph pool memory.*|Triton .*during inference.*"
)
"""Lines of an engine's log about planning, backends, graphs and memory, and about kernels that are
compiled while it serves."""
Setting = tuple[Load, int]


def prompts_for(load: Load, held_out: list[list[int]], concurrency: int) -> list[list[int]]:
    """Return a prompt for each request, none a prefix of another; or the held-out ones."""
    if load.prompt is None:
        return held_out
    texts = (islice(cycle(held_out), number, None) for number in range(concurrency))
    return [list(islice(chain.from_iterable(text), load.prompt)) for text in texts]


def measure_all(
    engine: EngineChild, size: Size, settings: Iterable[Setting], deadline: float
) -> Iterable[tuple[Setting, list[dict[str, Any]]]]:
    """Yield windows of each setting while there is time for one more setting.

    `deadline` is a time of `time.monotonic`. The first window does not count: it fills caches, and
    the planner learns.
    """
    held_out = engine.encode(texts=read_prompts(HELD_OUT))
    seconds = [size.warm_seconds] + [size.window_seconds] * size.rounds
    took = 0.0
    for load, concurrency in settings:
        started = time.monotonic()
        if started + took > deadline:
            return
        _tell(f"{load.name}, {concurrency} at a time")
        prompts = prompts_for(load, held_out, concurrency)
        asked: dict[str, Any] = {
            "prompts": prompts,
            "concurrency": concurrency,
            "tokens": load.tokens,
        }
        yield (load, concurrency), [engine.closed(**asked, seconds=one) for one in seconds][1:]
        took = time.monotonic() - started


def measure(size: Size, side_name: str, seconds: float, memory_gib: float, file: Path) -> int:
    """Measure one side of a size, writing results as they come. Returns 0 or 1."""
    deadline = time.monotonic() + seconds
    settings = [(load, count) for load in size.loads for count in load.concurrency]
    fitting = [one for one in settings if size.fits(*one, memory_gib)]
    verdict = f"0 of {len(settings)} settings" if fitting else "no memory for any load"
    found: dict[str, Any] = {"verdict": verdict, "measurements": []}
    file.write_text(json.dumps(found))
    if not fitting:
        return 0
    folder = models_folder(size, otherwise=file.parents[1])
    _tell(f"widening the pair into {folder}, unless that is done")
    pair = widened_demo(DEMO, folder, size.target, size.drafter, size.positions)
    side = side_of(side_name, pair.drafter)
    found |= {"pair": pair.name, "side": asdict(side)}
    log = file.parents[1] / "log" / f"{file.stem}-engine.log"
    _tell(f"starting the engine, its log is {log}")
    try:
        with EngineChild(
            log,
            environment={"VLLM_PLUGINS": side.plugins},
            model=pair.target,
            speculative_config=side.speculative_config,
            max_model_len=max(load.longest for load, _ in fitting),
            enable_prefix_caching=True,  # only decoding is measured
            **size.engine,
        ) as child:
            found["facts"] = child.facts()
            measured = measure_all(child, size, fitting, deadline)
            for number, ((load, count), results) in enumerate(measured, 1):
                setting = {
                    "load": f"{size.name}, {load.name}",
                    "setting": count,
                    "side": side.name,
                    "is_real": load.is_real,
                }
                found["measurements"] += [setting | {"result": one} for one in results]
                found["verdict"] = f"{number} of {len(settings)} settings"
                found["gpu_memory_mib"] = " ".join(ask_gpu("memory.used"))
                if side.plugins == PLUGIN:
                    found["stats"] = child.dflash_stats()[0]
                found["log"] = telling_lines(log)
                file.write_text(json.dumps(found, indent=1))
    except (EngineDied, ValueError) as error:
        # This side needs attention backends that not every GPU has.
        reasons = [one for one in str(error).splitlines() if "daptive verification" in one]
        if side.name != ADAPTIVE or not reasons:
            _tell(str(error))
            return 1
        file.write_text(json.dumps(found | {"refused": reasons[0].strip()}))
    return 0


def telling_lines(log: Path) -> list[str]:
    """Return each telling line once, without the text before the match."""
    return list(dict.fromkeys(TELLING.findall(log.read_text(errors="replace"))))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    name, side, seconds, memory_gib, file = sys.argv[1:]
    size = next(one for one in (*SIZES, TINY) if one.name == name)
    sys.exit(measure(size, side, float(seconds), float(memory_gib), Path(file)))
