"""Compare the engines of a bench of the plan, and keep what `vllm-dflash bench` found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gpu.gpu_benches import BENCHES, TINY
from gpu.gpu_machine import telling_lines
from vllm_dflash.tools.bench.bench_result import Results
from vllm_dflash.tools.bench.sides import OURS, PLAIN
from vllm_dflash.tools.cli import main as run_command_line


def verdict_of(data: dict[str, Any]) -> str:
    """Say how ours compares with plain decoding, at each number of requests."""
    results = Results.read(data)
    ratios = [
        f"{np.median(results.rounds(load, count, OURS) / results.rounds(load, count, PLAIN)):.2f}"
        f" at {count}"
        for load in results.loads
        for count in results.settings(load)
    ]
    return f"{data['rounds_complete']} rounds; ours / plain {', '.join(ratios)}"


def main(name: str, file: Path) -> int:
    """Run the bench of this name, and write its results to `file`. Returns its exit code."""
    bench = next(one for one in (*BENCHES, TINY) if one.name == name)
    out = file.parents[1] / "bench" / file.stem
    result = out / "result.json"
    result.unlink(missing_ok=True)
    pair = bench.pair(otherwise=file.parents[1])
    words = ["bench", "--target", pair.target, "--drafter", pair.drafter, *bench.flags]
    sys.argv = ["vllm-dflash", *words, "--out", str(out), "--", *bench.serve]  # `bench` names them
    try:
        return run_command_line()
    finally:  # rounds that are complete count, also if its time is over
        if result.is_file():
            data = json.loads(result.read_text())
            log = telling_lines(out / "logs" / f"{OURS}.log")
            found = {"verdict": verdict_of(data), "pair": pair.name, "log": log}
            file.write_text(json.dumps(data | found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
