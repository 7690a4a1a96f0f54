"""The target and the drafter a benchmark runs."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PARTS = ("target", "drafter")
"""Folders of the demo pair."""
TRAINED_ON = 512
"""Tokens that the training of the demo pair saw at a time."""


@dataclass(frozen=True)
class Pair:
    """Folders or repositories of a pair, and what to call it in a report."""

    target: str
    drafter: str
    name: str


def demo_pair(demo: Path, out: Path, *, as_it_is: bool, positions: int, context: int) -> Pair:
    """The demo pair, widened unless it is to stay as it is.

    Args:
        demo: its folder.
        out: folder for a copy, if one is needed.
        as_it_is: leave its sizes.
        positions: that its configs allow at least.
        context: longest prompt; that the name tells where drafts mean nothing.
    """
    _check_demo(demo)
    configs = {one: json.loads((demo / one / "config.json").read_text()) for one in PARTS}
    more = positions > configs[PARTS[0]]["max_position_embeddings"]
    sizes: dict[str, Any] = {"positions": positions} if more else {}
    if as_it_is and not more:
        target, drafter = (str(demo / one) for one in PARTS)
        pair = Pair(target, drafter, "demo pair as it is")
    elif as_it_is:
        from vllm_dflash.tools.bench.widen import Shape

        sizes |= {one: Shape.of(config) for one, config in configs.items()}
        pair = replace(widened_demo(demo, out, **sizes), name="demo pair as it is")
    else:
        pair = widened_demo(demo, out, **sizes)
    name = pair.name + f", {positions:,} positions" * more
    if context > TRAINED_ON:
        name += f"; trained on {TRAINED_ON} tokens at a time: beyond, texts and drafts are noise"
    return replace(pair, name=name)


def widened_demo(demo: Path, out: Path, **sizes: Any) -> Pair:
    """The demo pair made as large as one worth speeding up; what it computes stays the same.

    Made once for a folder; after that it is found there. `sizes`: as for `widen_pair`.
    """
    _check_demo(demo)
    from vllm_dflash.tools.bench import widen
    from vllm_dflash.tools.bench.widen import WIDE_DRAFTER, WIDE_TARGET

    wide = out / "widened"
    made_from = _digest([Path(widen.__file__), *demo.glob("target/*"), *demo.glob("drafter/*")])
    made_from += repr(sorted(sizes.items()))
    stamp = wide / "made_from"
    if not stamp.is_file() or stamp.read_text() != made_from:
        stamp.unlink(missing_ok=True)
        widen.widen_pair(demo, wide, **sizes)
        stamp.write_text(made_from)
    target, drafter = sizes.get("target", WIDE_TARGET), sizes.get("drafter", WIDE_DRAFTER)
    name = (
        f"demo pair widened to {target.layers} and {drafter.layers} layers of width {target.hidden}"
    )
    return Pair(str(wide / "target"), str(wide / "drafter"), name)


def _check_demo(demo: Path) -> None:
    if not (demo / "target").is_dir():
        raise ValueError(
            f"there is no demo pair in {demo}: it comes with a clone of the repository. Run this"
            " in the clone or pass --target and --drafter."
        )


def _digest(files: Iterable[Path]) -> str:
    parts = (hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files))
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def with_random_drafter(pair: Pair, out: Path) -> Pair:
    """The pair with drafts that are no use: its drafter's weights are noise."""
    import torch
    from safetensors.torch import load_file, save_file

    source, goal = Path(pair.drafter), out / "random_drafter"
    if not source.is_dir():
        raise ValueError(f"--random-drafter needs the drafter in a folder; {source} is none.")
    shutil.copytree(source, goal, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for file in sorted(goal.glob("*.safetensors")):
        noise = {
            name: torch.ones_like(tensor)
            if "norm" in name
            else torch.randn(tensor.shape, generator=generator).mul(0.02).to(tensor.dtype)
            for name, tensor in load_file(file).items()
        }
        save_file(noise, file, metadata={"format": "pt"})
    return replace(pair, drafter=str(goal), name=f"{pair.name}, random drafter")
