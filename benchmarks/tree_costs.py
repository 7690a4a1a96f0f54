"""What a step with draft trees costs on a GPU, compared with chains, on paper.

    python benchmarks/tree_costs.py

Computed from bytes and operations of an 8B target and an H100's data sheet. Nothing is measured.
The table is that of docs/engineering/trees.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BANDWIDTH = 3.35e12
"""Bytes a second, of an H100 SXM."""
OPERATIONS = 989e12
"""Operations a second, bfloat16, dense."""
LAUNCH = 2e-6
"""Seconds from kernel to kernel in a captured graph, if one waits for the other; assumed."""
TILE = 4096
"""Logits that are read for each candidate but the first (`confidence.py`)."""
BYTES, FLOAT = 2, 4
"""Bytes of a number in bfloat16, and in float32."""


@dataclass(frozen=True)
class Target:
    """Qwen3-8B."""

    layers: int = 36
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    intermediate: int = 12288
    vocab: int = 151_936

    @property
    def weights(self) -> int:
        """Numbers that a step multiplies by, including the head."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_size
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + (
            self.hidden * self.vocab
        )

    @property
    def kv_bytes(self) -> int:
        """K/V bytes of a token."""
        return self.layers * 2 * self.kv_heads * self.head_size * BYTES


@dataclass(frozen=True)
class Step:
    """Requests of the same context, with the same number of drafts each."""

    target: Target
    requests: int
    context: int
    drafts: int

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.requests * (1 + self.drafts)

    def floor(self) -> float:
        """Lower bound in seconds: reading weights and caches once, or multiplying, whichever takes
        longer; and writing and reading logits."""
        target = self.target
        products = 2 * target.weights * self.rows / OPERATIONS
        scores = 4 * target.layers * target.heads * target.head_size * self.context * self.rows
        caches = self.requests * self.context * target.kv_bytes
        logits = 2 * self.rows * target.vocab * BYTES
        return (
            max(target.weights * BYTES / BANDWIDTH, products)
            + max(caches / BANDWIDTH, scores / OPERATIONS)
            + logits / BANDWIDTH
        )

    def tree_bytes(self, accepted: int = 4) -> dict[str, float]:
        """Bytes that trees move in this step and chains do not."""
        target, rows = self.target, self.rows
        of_rows = target.layers * rows * target.heads
        features = target.hidden * BYTES  # of all taps, fused
        return {
            # Queries and their partial results are read, with sums, and written once more.
            "nodes": of_rows * (3 * target.head_size * BYTES + FLOAT)
            + self.requests * self.drafts * target.kv_bytes,
            "sums": of_rows * FLOAT,
            "candidates": 7 * self.requests * 15 * TILE * BYTES,
            "moved": 2 * self.requests * accepted * (target.kv_bytes + features),
        }

    def segment_bytes(self) -> float:
        """Bytes that our kernel for contexts moves in addition, if it replaces FlashAttention.

        Results of each segment are written and read (`num_segments` of `tree_context.py`).
        """
        target = self.target
        tiles = -(-self.rows * target.heads // target.kv_heads // 64) * target.kv_heads
        segments = max(1, min(16, 264 // tiles))
        found = self.rows * target.heads * (target.head_size + 1) * FLOAT
        return 2 * target.layers * segments * found

    def tree_launches(self) -> dict[str, int]:
        """Kernels that trees add to a step."""
        return {
            "nodes": self.target.layers,
            "plans of FlashAttention": self.target.layers,
            "lengths": 3,
            "build": 2,
            "places, walk": 3,
            "moves": 2,
        }

    def added(self) -> float:
        """Seconds that trees add."""
        moved, launches = self.tree_bytes(), self.tree_launches()
        return sum(moved.values()) / BANDWIDTH + LAUNCH * sum(launches.values())


HEADER = (
    "| requests | context | plain | chain of 15 | tree of 16 | tree of 32"
    " | of which added | 16 / chain | 32 / chain |\n|" + "---:|" * 9
)


def lines() -> Iterator[str]:
    """Yield the lines of the table."""
    target = Target()
    yield HEADER
    for requests in (1, 4, 16):
        for context in (1024, 8192, 32768):
            plain, chain, small, large = (
                Step(target, requests, context, drafts) for drafts in (0, 15, 16, 32)
            )
            times = [each.floor() for each in (plain, chain)]
            times += [each.floor() + each.added() for each in (small, large)]
            ratios = [time / times[1] for time in times[2:]]
            yield (
                f"| {requests} | {context // 1024}k | "
                + " | ".join(f"{1000 * time:.2f}" for time in [*times, large.added()])
                + "".join(f" | {ratio:.2f}" for ratio in ratios)
                + " |"
            )


def main() -> None:
    """Print the table, and the numbers for the text below it."""
    print("\n".join(lines()))
    for requests in (1, 4, 16):
        step = Step(Target(), requests, 8192, 32)
        parts = {name: moved / BANDWIDTH for name, moved in step.tree_bytes().items()}
        parts["launches"] = LAUNCH * sum(step.tree_launches().values())
        parts["segments, on TRITON_ATTN"] = step.segment_bytes() / BANDWIDTH
        print(
            f"{requests}:", ", ".join(f"{name} {1000 * each:.3f}" for name, each in parts.items())
        )


if __name__ == "__main__":
    main()
