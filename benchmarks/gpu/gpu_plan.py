"""Parts of a run: commands, and how long each may take."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from gpu.gpu_machine import ROOT
from gpu.gpu_sizes import SIZES, TINY, Size

DEMO = ROOT / "models" / "demo"
HERE = Path(__file__).parent
LIMIT = 1.1
"""Of a part's seconds, when it is ended."""
COMMAND = (sys.executable, "-m", "vllm_dflash.tools.cli")
# Fixed: on so small a pair drafting may not pay, and then nothing would be verified.
DFLASH = {"method": "dflash", "model": str(DEMO / "drafter"), "draft_length": "fixed"}
RESULT = "{result}"
TARGET = ("--target", str(DEMO / "target"))
VERIFY = (*COMMAND, "verify", *TARGET, "--speculative-config", json.dumps(DFLASH))
PARITY = (*COMMAND, "parity", str(DEMO / "drafter"), *TARGET, "--json")
TOLERANCES = {"float32": "1e-2", "bfloat16": "0.1"}
"""Float32 attention on CUDA is Triton's, whose products keep 10 bits of a number (TF32)."""


@dataclass(frozen=True)
class Part:
    """One command, whose outcome is a file."""

    name: str
    seconds: float
    """It should take so long at most."""
    command: tuple[str, ...]
    """`RESULT` stands for the file of its result; with `--json`, that is what it prints."""

    @property
    def slug(self) -> str:
        """Its name in those of files."""
        return self.name.replace(" ", "-").replace("=", "")


def plan(memory_gib: float) -> list[Part]:
    """What a GPU with so much memory runs."""
    parts = [_tests(360), Part("verify", 150, (*VERIFY, "--out", RESULT))]
    for dtype, tolerance in TOLERANCES.items():
        options = ("--dtype", dtype, "--tolerance", tolerance)
        parts.append(Part(f"parity {dtype}", 75, (*PARITY, *options)))
    return parts + [part for size in SIZES for part in _bench(size, memory_gib)]


def plan_dry_run(prompts: Path) -> list[Part]:
    """All kinds of parts, as small as can be."""
    few = ("--prompts", str(prompts), "--concurrency", "2", "--tokens", "8", "--dtype", "float32")
    flags = ("--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "2")
    verify = (*VERIFY, "--out", RESULT, *few, "--", *flags)
    parity = (*PARITY, "--num-prompts", "1", "--tokens", "6", "--max-model-len", "256")
    parts = [_tests(300), Part("verify", 300, verify), Part("parity float32", 300, parity)]
    return parts + _bench(TINY, memory_gib=1.0)


def environment(*, is_dry: bool) -> dict[str, str]:
    """Of all parts. Dry: Model Runner V2 in Triton's interpreter, and an engine is one process."""
    paths = [HERE.parent, ROOT] + ([HERE / "interpreter", ROOT / "tests"] if is_dry else [])
    paths_before = filter(None, [os.environ.get("PYTHONPATH", "")])
    ours = {"PYTHONPATH": os.pathsep.join([*map(str, paths), *paths_before])}
    if is_dry:
        ours |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return os.environ | ours


def _tests(seconds: float) -> Part:
    command = ("pytest", "tests/engine/test_cuda.py", "-m", "cuda", "-p", "no:cacheprovider")
    return Part("tests", seconds, (sys.executable, "-m", *command))


def _bench(size: Size, memory_gib: float) -> list[Part]:
    parts = []
    for number, side in enumerate(size.sides):
        seconds = size.seconds + (0.0 if number else size.seconds_to_widen)
        arguments = (size.name, side, str(seconds), str(memory_gib), RESULT)
        command = (sys.executable, "-m", "gpu.gpu_measure", *arguments)
        parts.append(Part(f"{size.name} {side}", seconds, command))
    return parts
