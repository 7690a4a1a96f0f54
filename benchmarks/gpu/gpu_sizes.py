"""Pairs that are measured, and under which loads: chosen for the time there is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_dflash.tools.bench.sides import NO_PLUGIN, OURS, PLAIN, PLUGIN, Side, make_sides
from vllm_dflash.tools.bench.widen import Shape

HEAD_DIM = 64
"""Head size of the demo pair; widening keeps it."""
LONGEST_DRAFT = 7
HELD_OUT_TOKENS = 256
"""Most tokens of a held-out prompt."""
NATIVE = ("native K=3", "native K=7")
ADAPTIVE, FIXED, BLOCKS_ONLY = "native adaptive", "ours K=7", "ours, blocks only"
TREES = (15, 31)
"""Nodes of draft trees."""
BESIDE = ("ngram", "blocks", *(f'{{"draft_tree": {nodes}}}' for nodes in TREES))
"""Engines beside plain, native and ours, as `bench --beside` has them."""
WITH_TREES = tuple(f"ours, draft_tree {nodes}" for nodes in TREES)


@dataclass(frozen=True)
class Load:
    """Requests of one kind, at several numbers in flight."""

    name: str
    prompt: int | None
    """Tokens of a prompt; None: the held-out prompts as they are."""
    tokens: int
    """New tokens of a request."""
    concurrency: tuple[int, ...]
    is_real: bool = True
    """Whether the pair was made for such positions. If not, its drafts mean nothing."""

    @property
    def longest(self) -> int:
        """Tokens of a finished request, and a draft."""
        return (self.prompt or HELD_OUT_TOKENS) + self.tokens + LONGEST_DRAFT + 1


@dataclass(frozen=True)
class Size:
    """The demo pair, widened, with the engines that run it and under which loads."""

    name: str
    group: str
    """Parts that are asked for together; those of one group fit into one or two commands."""
    pair: str
    """The pair's name; sizes of the same pair share its files."""
    target: Shape
    drafter: Shape
    sides: tuple[str, ...]
    """The first one's engine also makes the pair."""
    loads: tuple[Load, ...]
    """The most important first: the last ones are left out if time is short."""
    seconds: float
    """Seconds of an engine, including its start."""
    seconds_to_widen: float = 0.0
    warm_seconds: float = 1.5
    window_seconds: float = 2.5
    rounds: int = 2
    engine: dict[str, Any] = field(default_factory=lambda: {"max_num_seqs": 256})

    def fits(self, load: Load, concurrency: int, memory_gib: float) -> bool:
        """Return whether this many requests fit beside the weights, in bfloat16."""
        numbers = 0
        for one in (self.target, self.drafter):
            numbers += 2 * HEAD_DIM * one.kv_heads * one.layers * concurrency * load.longest
        return 2 * numbers + self.bytes_of_weights < 0.8 * memory_gib * 2**30

    @property
    def bytes_of_weights(self) -> int:
        """Bytes of the layers of both, in bfloat16."""
        numbers = 0
        for one in (self.target, self.drafter):
            heads = 2 * HEAD_DIM * (one.heads + one.kv_heads)
            numbers += one.layers * one.hidden * (heads + 3 * one.intermediate)
        return 2 * numbers

    @property
    def positions(self) -> int:
        """Positions that the pair's configs must allow, for all sizes that share it."""
        sharing = [size for size in SIZES if size.pair == self.pair] or [self]
        return max(load.longest for size in sharing for load in size.loads)


def side_of(name: str, drafter: str) -> Side:
    """Return one of the compared engines, by name."""
    sides = make_sides(drafter, range(1, LONGEST_DRAFT + 1), BESIDE)
    longest = next(side for side in sides if side.draft_tokens == LONGEST_DRAFT)
    config = longest.speculative_config or {}
    adaptive = config | {"enable_adaptive_verification": True}
    # Treated as vLLM's other side whose length is not fixed.
    sides.append(Side(ADAPTIVE, "native schedule", NO_PLUGIN, adaptive))
    sides.append(Side(FIXED, "beside", PLUGIN, config | {"draft_length": "fixed", "require": True}))
    return next(side for side in sides if side.name == name)


# Weights, layers and K/V bytes a token of Qwen3-1.7B. Its width is not the pair's times a power of
# four, so more MLP rows make up for it. The drafter has the weights of five of those layers.
LIKE_1_7B: dict[str, Any] = {
    "pair": "1.7B",
    "target": Shape(hidden=1024, intermediate=14336, heads=32, kv_heads=16, layers=28),
    "drafter": Shape(hidden=1024, intermediate=24576, heads=32, kv_heads=16, layers=3),
}
# Qwen3-8B's, in the same way.
LIKE_8B: dict[str, Any] = {
    "pair": "8B",
    "target": Shape(hidden=4096, intermediate=13568, heads=32, kv_heads=16, layers=36),
    "drafter": Shape(hidden=4096, intermediate=22528, heads=32, kv_heads=16, layers=3),
    "seconds_to_widen": 60,
}
SIZES = (
    Size(
        "8B",
        "speed",
        **LIKE_8B,
        sides=(PLAIN, OURS, *NATIVE, ADAPTIVE, "ngram", BLOCKS_ONLY, *WITH_TREES),
        loads=(Load("contexts up to 0.4k", None, 192, (1, 8, 32, 64)),),
        seconds=75,
    ),
    Size(
        "8B long",
        "rest",
        **LIKE_8B,
        sides=(PLAIN, OURS, "native K=7"),
        loads=(
            Load("contexts up to 2k", 1664, 320, (1, 16)),
            Load("contexts of 8k", 7680, 480, (8,), is_real=False),
            Load("contexts of 32k", 32000, 512, (2,), is_real=False),
        ),
        seconds=90,
    ),
    Size(
        "1.7B",
        "rest",
        **LIKE_1_7B,
        sides=(PLAIN, *NATIVE, ADAPTIVE, OURS, FIXED),
        loads=(
            Load("contexts up to 0.4k", None, 192, (1, 8, 32, 256)),
            Load("contexts up to 2k", 1664, 320, (1, 16)),
            Load("contexts of 8k", 7680, 480, (1, 8), is_real=False),
            Load("contexts of 32k", 32000, 512, (1, 4), is_real=False),
        ),
        seconds=130,
        seconds_to_widen=20,
    ),
)
TINY = Size(
    "tiny",
    "dry",
    "tiny",
    Shape(hidden=256, intermediate=768, heads=4, kv_heads=2, layers=7),
    Shape(hidden=256, intermediate=768, heads=4, kv_heads=2, layers=3),
    (OURS,),
    (Load("contexts of 0.1k", 48, 16, (2,)),),
    seconds=60,
    warm_seconds=0.1,
    window_seconds=0.5,
    rounds=1,
    engine={"max_num_seqs": 2, "enforce_eager": True, "dtype": "float32"},
)
"""For a dry run."""
