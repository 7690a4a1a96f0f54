"""Measure a drafter with quantised targets: acceptance and speed, as a table.

    PYTHONPATH=tests scripts/run.sh python benchmarks/quantised_targets.py

writes SmolLM2-135M-Instruct (`examples/smollm2_target.py` makes it) with weights of 8 bits (W8A8)
and of 4 (W4A16, groups of 32) to `out/quantised`, rounded to the nearest and not calibrated. The
drafter stays the one that was trained for the target in bf16. `vllm-dflash bench` measures each of
the three on HumanEval, on chat, and on code to write out again with a name changed. Engines are
not compiled, so that they start faster.

On CPUs, vLLM multiplies weights of 4 bits only with AVX-512. Without it, the rounded weights are
written out in full: acceptance is that of W4A16, speed is not.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from support.quantised import quantise
from vllm_dflash.tools.bench.bench_result import Results, spread
from vllm_dflash.tools.bench.sides import OURS, PLAIN
from vllm_dflash.tools.default_dtype import with_dtype
from vllm_dflash.tools.progress import progress_on
from vllm_dflash.tools.tables import Table

SMOLLM2 = Path("models/smollm2")
TARGET, DRAFTER = SMOLLM2 / "target", SMOLLM2 / "drafter"
PROMPTS = [str(SMOLLM2 / f"{name}.jsonl") for name in ("human_eval", "chat", "edits")]
WAYS = {"W8A8": "int8", "W4A16": "int4"}
NO_NATIVE = ["--native-k"]


def targets(folder: Path) -> dict[str, Path]:
    """Return the target as it is and quantised, by their names in the table."""
    found = {"as it is": TARGET}
    for name, way in WAYS.items():
        is_written_out = way == "int4" and not has_int4_kernels()
        goal = folder / f"{way}{'-written-out' * is_written_out}"
        found[name + ", written out" * is_written_out] = goal
        if not goal.exists():
            partial = goal.with_name(f"{goal.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            meant = quantise(TARGET.resolve(), partial, way)
            if is_written_out:
                shutil.copy(TARGET / "config.json", partial)
                save_file(meant, partial / "model.safetensors", metadata={"format": "pt"})
            partial.rename(goal)
    return found


def has_int4_kernels() -> bool:
    """Return whether this vLLM can multiply with weights of 4 bits."""
    from vllm import _custom_ops  # noqa: F401 - loads the kernels
    from vllm.platforms import current_platform

    return not current_platform.is_cpu() or hasattr(torch.ops._C, "cpu_gemm_wna16")


def measure(target: Path, out: Path, options: list[str]) -> Results:
    """Run plain decoding and ours on this target."""
    pair = ["--target", str(target), "--drafter", str(DRAFTER), "--prompts", *PROMPTS]
    command = ["vllm-dflash", "bench", *pair, *NO_NATIVE, *options, "--out", str(out)]
    command += ["--", "--enforce-eager"]
    subprocess.run(command, check=True)
    return Results.read(json.loads((out / "result.json").read_text()))


def table(found: dict[str, Results], dtype: str) -> Table:
    """Make a row for each target, kind of prompts and number of requests."""
    rows = []
    for target, results in found.items():
        for load in results.loads:
            for setting in results.settings(load):
                plain, ours = (results.rounds(load, setting, side) for side in (PLAIN, OURS))
                lengths = results.rounds(load, setting, OURS, "spec_decode_acceptance_length")
                cells = [target, load, str(setting)]
                cells += [f"{np.median(lengths):.2f}", f"{np.median(plain):.1f}"]
                rows.append([*cells, f"{np.median(ours):.1f}", spread(ours / plain)])
    heads = ["target", "prompts", "requests", "tokens a step", "plain", "ours", "ours / plain"]
    title = f"tokens/s, tokens a step that verifies, medians of rounds; activations in {dtype}"
    return Table(title, heads, rows, words=(0, 1))


def main() -> None:
    """Measure one target after the other, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/quantised"))
    parser.add_argument("--concurrency", nargs="+", default=["1", "8"])
    parser.add_argument("--rounds", default="3")
    parser.add_argument("--num-prompts", default="24", help="of a measurement")
    parser.add_argument("--dtype", help="of activations (default: the target's, or float32)")
    parsed = parser.parse_args()
    parsed.out.mkdir(parents=True, exist_ok=True)
    flags = with_dtype(parsed.dtype, progress_on(), str(TARGET))
    dtype = flags[-1] if flags else "bfloat16"
    options = ["--concurrency", *parsed.concurrency, "--rounds", parsed.rounds]
    options += ["--num-prompts", parsed.num_prompts, "--dtype", dtype]
    found = {
        name: measure(target, parsed.out / f"bench-{target.name}", options)
        for name, target in targets(parsed.out).items()
    }
    (parsed.out / "table.md").write_text(table(found, dtype).markdown())
    print((parsed.out / "table.md").read_text())


if __name__ == "__main__":
    main()
