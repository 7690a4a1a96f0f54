"""The target and the drafter that a benchmark or a demonstration runs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from vllm_dflash.tools.bench import widen
from vllm_dflash.tools.bench.widen import WIDE_DRAFTER, WIDE_TARGET, Shape, widen_pair


@dataclass(frozen=True)
class Pair:
    """Folders or repositories of a pair, and its name in reports."""

    target: str
    drafter: str
    name: str


def given_pair(target: str | None, drafter: str | None) -> Pair | None:
    """Return the pair that the user named, if any. Raises ValueError if only one is given."""
    if target is None and drafter is None:
        return None
    if target is None or drafter is None:
        raise ValueError("--target and --drafter belong together: pass both, or neither.")
    return Pair(target, drafter, f"{target} and {drafter}")


def widened_demo(
    demo: Path,
    out: Path,
    target: Shape = WIDE_TARGET,
    drafter: Shape = WIDE_DRAFTER,
    positions: int = 0,
) -> Pair:
    """Widen the demo pair to the cost of a larger one, without changing what it computes.

    The result is cached in `out`. Sizes are as for `widen_pair`. The pair's name says if it allows
    more `positions` than the original.
    """
    sizes = target, drafter, positions
    digest = hashlib.sha256(repr(sizes).encode())
    files = Path(widen.__file__), *demo.glob("target/*"), *demo.glob("drafter/*")
    for file in sorted(filter(Path.is_file, files)):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    wide = out / "widened"
    stamp = wide / "made_from"
    if not stamp.is_file() or stamp.read_text() != digest.hexdigest():
        stamp.unlink(missing_ok=True)  # so that an interrupted widening is not taken for done
        widen_pair(demo, wide, *sizes)
        stamp.write_text(digest.hexdigest())
    layers = f"{target.layers} and {drafter.layers} layers"
    name = f"demo pair widened to {layers} of width {target.hidden}"
    config = demo / "target" / "config.json"
    if positions and positions > json.loads(config.read_text())["max_position_embeddings"]:
        name += f", {positions:,} positions"
    return Pair(str(wide / "target"), str(wide / "drafter"), name)
