"""Parts of a run: commands, how long each should take, and which belong together."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from demo_models import DEMO
from gpu.gpu_benches import BENCHES, REST, SMOLLM2, SPEED, TINY, Bench
from gpu.gpu_machine import ROOT
from vllm_dflash.tools.tables import Table

HERE = Path(__file__).parent
LONGEST = 480.0
"""Most seconds of a part, so that ten minutes of a GPU at a time are enough for any part."""
RESULT = "{result}"
NODES = 15
"""Nodes of draft trees, if they are asked for."""
PARITY = (
    *(sys.executable, str(HERE.parent / "parity"), str(DEMO / "drafter")),
    *("--target", str(DEMO / "target"), "--json"),
    *("--gpu-memory-utilization", "0.3"),  # other parts may run beside it
)
TOLERANCES = {"float32": "1e-2", "bfloat16": "0.1"}
TEXTS, DRAFTERS, SOUND = "texts", "drafters", "sound"
"""Groups: texts, speed, drafters, sound, rest, in this order."""
GEMMA = ROOT / "models" / "gemma3-270m"
"""A real pair, as SmolLM2's. Parts with it are planned if its target was made there."""
BACKENDS = {"FLASH_ATTN": "bfloat16", "TRITON_ATTN": "float32"}
"""Backends, and the dtype that each is tried in: FlashAttention has no float32."""


@dataclass(frozen=True)
class Part:
    """One command, whose outcome is a file."""

    name: str
    seconds: float
    """Expected seconds when it runs alone: a guess, because on a GPU parts ran side by side."""
    command: tuple[str, ...]
    """`RESULT` stands for the file of its result; with `--json`, that is what it prints."""
    group: str = ""
    needs: tuple[str, ...] = ()
    """Packages that it needs; without them it is skipped."""

    @property
    def slug(self) -> str:
        """Its name as part of file names."""
        return self.name.replace(" ", "-").replace("=", "")

    @property
    def limit(self) -> float:
        """Seconds after which it is ended."""
        return min(2 * self.seconds, LONGEST)


def plan() -> list[Part]:
    """Plan what a GPU runs, in the order of what is least known.

    An hour and a half with both real targets: texts 7 minutes, speed 14, drafters 12, sound 16,
    rest 38. On an H200, 28 minutes had room for the first four (docs/gpu.md): texts, then the
    benches alone, then a drafter beside what is sound, five or six parts at a time.
    """
    both = BACKENDS.items()
    parts = [_planned(backend, dtype, "graphs", 60) for backend, dtype in both]
    parts += [_adaptive(backend, dtype, 60) for backend, dtype in both]
    parts.append(_tests("synchronous", "test_cuda", 150, "-k", "synchronous and adaptive"))
    has_smollm2 = (SMOLLM2 / "target").is_dir()
    parts += [_bench(one) for one in BENCHES if one.group == SPEED and (one.size or has_smollm2)]
    if has_smollm2:
        # On an H200, 11,000 answers of the first minute were learned by heart after 150 s.
        parts += _training("SmolLM2", SMOLLM2, answers=150, training=180)
    if (GEMMA / "target").is_dir():
        parts += _training("Gemma 3 270M", GEMMA, answers=90, training=180)
    for dtype, tolerance in TOLERANCES.items():
        options = ("--dtype", dtype, "--tolerance", tolerance)
        parts.append(Part(f"parity {dtype}", 60, (*PARITY, *options), SOUND))
    parts += [_soak(backend, dtype, 100, 150) for backend, dtype in both]
    parts += [_kernels(150, "cuda"), _tests("graphs", "test_cuda", 240)]
    parts.append(_tests("load", "test_cuda_load", 120))
    for mode, seconds in (("eager", 60), ("graphs", 90)):
        parts += [_text(backend, dtype, mode, seconds) for backend, dtype in both]
        parts += [_trees(backend, dtype, mode, seconds) for backend, dtype in both]
    parts += [_planned(backend, dtype, "eager", 60) for backend, dtype in both]
    return parts + [_bench(one) for one in BENCHES if one.group == REST]


def plan_dry_run(prompts: Path) -> list[Part]:
    """Plan all kinds of parts, as small as possible.

    Alone on two cores with AVX-512 it took 9 minutes: kernels 15 s, text eager 46, text graphs 49,
    planned text 52, adaptive text 57, trees eager 71, trees graphs 89, load 51, parity 26, soak 51,
    tiny bench 70. Here is twice that or more, for slower and busy machines.
    """
    few = ("--prompts", str(prompts), "--tokens", "8", "--concurrency", "2", "--tiny")
    parity = (*PARITY, "--num-prompts", "1", "--tokens", "6", "--max-model-len", "256")
    return [
        _kernels(120, "cpu"),
        _text("", "float32", "eager", 120, *few),
        _text("", "float32", "graphs", 100, *few),
        _planned("", "float32", "graphs", 105, *few),
        _adaptive("", "float32", 115, *few),
        _trees("", "float32", "eager", 140, *few),
        _trees("", "float32", "graphs", 180, *few),
        _tests("load", "test_cuda_load", 105, "--emulated", "--slow"),
        Part("parity float32", 90, parity, SOUND),
        _soak("", "float32", 4, 100, "--tiny"),
        _bench(TINY),
    ]


def chosen(parts: Sequence[Part], asked: Sequence[str]) -> list[Part]:
    """Return parts asked for by name or group, in the order of the plan; all, if none are.

    Raises:
        ValueError: there is no such part; the message names the nearest.
    """
    known = {one for part in parts for one in (part.name, part.slug, part.group)}
    for name in asked:
        if name not in known:
            (nearest,) = get_close_matches(name, sorted(known), n=1, cutoff=0.0)
            raise ValueError(f"no part is called {name!r}; the nearest is {nearest!r}")
    return [p for p in parts if not asked or {p.name, p.slug, p.group}.intersection(asked)]


def list_of(parts: Sequence[Part]) -> Table:
    """List the parts that can be asked for."""
    rows = [[part.group, part.name, f"{part.seconds:.0f}", f"{part.limit:.0f}"] for part in parts]
    return Table("Parts", ["group", "part", "s planned", "s at most"], rows, words=(0, 1))


def environment(*, is_dry: bool) -> dict[str, str]:
    """Return variables of all parts. Dry: on an emulated GPU, with each engine in one process."""
    paths = [HERE.parent, ROOT, ROOT / "tests"] + ([HERE / "emulated_gpu"] if is_dry else [])
    paths_before = filter(None, [os.environ.get("PYTHONPATH", "")])
    ours = {"PYTHONPATH": os.pathsep.join([*map(str, paths), *paths_before])}
    # Triton's float32 products keep 10 bits on tensor cores, so no text would repeat exactly.
    ours["TRITON_F32_DEFAULT"] = "ieee"
    if find_spec("flashinfer") is None:  # or vLLM's sampler stops when it looks for it
        ours["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return os.environ | ours


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"gpu.{name}", *arguments, RESULT)


def _kernels(seconds: float, sizes: str) -> Part:
    return Part("kernels", seconds, _module("gpu_kernels", sizes), SOUND)


def _text(backend: str, dtype: str, mode: str, seconds: float, *more: str) -> Part:
    name = " ".join(filter(None, ("text", mode, backend)))
    options = (*more, "--dtype", dtype, "--mode", mode, "--backend", backend)
    return Part(name, seconds, _module("gpu_text", *options), REST)


def _planned(backend: str, dtype: str, mode: str, seconds: float, *more: str) -> Part:
    text = _text(backend, dtype, mode, seconds, *more, "--planned")
    return replace(text, name=f"planned {text.name}", group=TEXTS if mode == "graphs" else REST)


def _adaptive(backend: str, dtype: str, seconds: float, *more: str) -> Part:
    text = _text(backend, dtype, "graphs", seconds, *more, "--adaptive")
    return replace(text, name=f"adaptive {text.name}", group=TEXTS)


def _trees(backend: str, dtype: str, mode: str, seconds: float, *more: str) -> Part:
    text = _text(backend, dtype, mode, seconds, *more, "--tree", str(NODES))
    return replace(text, name=f"trees{text.name.removeprefix('text')}", group=REST)


def _soak(backend: str, dtype: str, traffic: float, seconds: float, *more: str) -> Part:
    options = (*more, "--dtype", dtype, "--seconds", str(traffic), "--backend", backend)
    name = " ".join(filter(None, ("soak", backend)))
    return Part(name, seconds, _module("gpu_soak", *options), SOUND)


def _tests(name: str, module: str, seconds: float, *more: str) -> Part:
    file = f"tests/engine/{module}.py"
    options = ("-v", "-m", "cuda", "-p", "no:cacheprovider", *more)
    command = (sys.executable, "-m", "pytest", file, *options)
    group = SOUND if name != "synchronous" else TEXTS
    return Part(name, seconds, command, group, needs=("pytest", "hypothesis"))


def _training(name: str, pair: Path, *, answers: float, training: float) -> list[Part]:
    """Train a pair's drafter on answers that the GPU writes first. What is not written when that
    part is ended is not missed."""
    here = (sys.executable, str(ROOT / "examples" / "train_drafter.py"))
    hours = f"{training / 3600:.3f}"
    options = ("--pair", pair.name, "--device", "cuda", "--rounds", "8", "--hours", hours)
    steps = {"answers": answers, "train": training + 60, "export": 20.0}
    return [
        Part(f"{name} {step}", most, (*here, step, *options), DRAFTERS)
        for step, most in steps.items()
    ]


def _bench(bench: Bench) -> Part:
    return Part(bench.name, bench.seconds, _module("gpu_bench", bench.name), bench.group)
