"""Benches of the plan: pairs, engines and loads, chosen for the time there is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from demo_models import DEMO, HELD_OUT
from gpu.gpu_machine import ROOT
from gpu.gpu_models import models_folder
from vllm_dflash.tools.bench.bench_pair import Pair, widened_demo
from vllm_dflash.tools.bench.widen import Shape

SMOLLM2 = ROOT / "models" / "smollm2"
"""A real pair. It is measured if its target was made there (CONTRIBUTING.md)."""
POSITIONS = 33_000
"""Most tokens of a request. Beyond the context of the demo pair, drafts are noise."""


@dataclass(frozen=True)
class Size:
    """Shapes that the demo pair is widened to."""

    name: str
    target: Shape
    drafter: Shape

    @property
    def bytes_of_weights(self) -> int:
        """Bytes of the layers of both, in bfloat16."""
        numbers = 0
        for one in (self.target, self.drafter):
            heads = 2 * 64 * (one.heads + one.kv_heads)  # heads of the demo pair have 64 numbers
            numbers += one.layers * one.hidden * (heads + 3 * one.intermediate)
        return 2 * numbers


@dataclass(frozen=True)
class Bench:
    """One run of `vllm-dflash bench`."""

    name: str
    group: str
    seconds: float
    flags: tuple[str, ...]
    """Flags of `bench`: engines, loads, rounds. All engines stay on the GPU and take turns."""
    serve: tuple[str, ...]
    """Flags of `vllm serve`, for every engine."""
    size: Size | None = None
    """None: SmolLM2."""

    def pair(self, otherwise: Path) -> Pair:
        """Return its pair, which is made if it is a widened one. `otherwise`: a folder for it, if
        memory has no room."""
        if self.size is None:
            folders = str(SMOLLM2 / "target"), str(SMOLLM2 / "drafter")
            return Pair(*folders, "SmolLM2-135M-Instruct")
        folder = models_folder(self.size.name, self.size.bytes_of_weights, otherwise)
        return widened_demo(DEMO, folder, self.size.target, self.size.drafter, POSITIONS)


# Weights, layers and K/V bytes a token of Qwen3-1.7B. Its width is not the pair's times a power of
# four, so more MLP rows make up for it. The drafter has the weights of five of those layers.
LIKE_1_7B = Size(
    "1.7B",
    Shape(hidden=1024, intermediate=14336, heads=32, kv_heads=16, layers=28),
    Shape(hidden=1024, intermediate=24576, heads=32, kv_heads=16, layers=3),
)
# Qwen3-8B's, in the same way.
LIKE_8B = Size(
    "8B",
    Shape(hidden=4096, intermediate=13568, heads=32, kv_heads=16, layers=36),
    Shape(hidden=4096, intermediate=22528, heads=32, kv_heads=16, layers=3),
)
TINY_SIZE = Size(
    "tiny",
    Shape(hidden=256, intermediate=768, heads=4, kv_heads=2, layers=7),
    Shape(hidden=256, intermediate=768, heads=4, kv_heads=2, layers=3),
)
NATIVE, TREE = ("--native-k", "3", "7"), '{"draft_tree": 15}'
PROMPTS = ("--prompts", str(HELD_OUT), "--ignore-eos")
REAL = (*PROMPTS, "--output-len", "128", "--max-model-len", "512")
HUMAN_EVAL = ("--prompts", str(SMOLLM2 / "human_eval.jsonl"), "--output-len", "192")


def long_prompts(tokens: int, *concurrency: str) -> tuple[str, ...]:
    """Return flags for random prompts of so many tokens, behind which drafts are noise."""
    random = ("--dataset-name", "random", "--random-input-len", str(tokens), "--ignore-eos")
    lengths = ("--output-len", "256", "--max-model-len", str(tokens + 512))
    return (*random, *lengths, "--concurrency", *concurrency, "--num-prompts", concurrency[-1])


def cache(gib: float) -> tuple[str, ...]:
    """Return the flag for this size of a KV cache, which lets engines start at the same time."""
    return ("--kv-cache-memory-bytes", str(int(gib * 2**30)))


SPEED, REST = "speed", "rest"
THREE, TWO = ("--rounds", "3"), ("--rounds", "2")
MANY = ("--concurrency", "1", "8", "32", "64")
BENCHES = (
    Bench("8B", SPEED, 380, (*REAL, *MANY, *THREE, *NATIVE), cache(5), LIKE_8B),
    Bench(
        "SmolLM2 on HumanEval",
        SPEED,
        440,
        (
            *(*HUMAN_EVAL, "--concurrency", "1", "8", "32", *TWO, *NATIVE),
            *("--beside", "blocks", TREE, "ngram"),
        ),
        cache(4),
    ),
    Bench(
        "8B trees",
        REST,
        400,
        (*REAL, *MANY, *TWO, "--native-k", "--beside", TREE),
        cache(5),
        LIKE_8B,
    ),
    Bench("8B, 8k", REST, 380, (*long_prompts(7_680, "1", "8"), *TWO, *NATIVE), cache(12), LIKE_8B),
    Bench(
        "8B, 32k",
        REST,
        330,
        (*long_prompts(32_000, "1", "4"), *TWO, "--native-k", "7"),
        cache(24),
        LIKE_8B,
    ),
    Bench(
        "1.7B",
        REST,
        380,
        (*REAL, *MANY, "256", "--max-num-seqs", "256", *TWO, *NATIVE),
        cache(16),
        LIKE_1_7B,
    ),
)
TINY = Bench(
    "tiny",
    SPEED,
    100,
    (
        *(*PROMPTS, "--output-len", "8", "--max-model-len", "320"),
        *("--concurrency", "2", "--num-prompts", "2", "--rounds", "1", "--warmup-rounds", "0"),
        *("--max-num-seqs", "2", "--dtype", "float32", "--native-k"),
    ),
    ("--enforce-eager", *cache(1 / 32)),
    TINY_SIZE,
)
"""For a dry run."""
