"""The target and the drafter that a benchmark or a demonstration runs."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_dflash.tools.bench import widen
from vllm_dflash.tools.bench.widen import WIDE_DRAFTER, WIDE_TARGET, Shape, widen_pair

TRAINED_ON = 512
"""Tokens per sequence in the training of the demo pair."""


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


def demo_pair(demo: Path, out: Path, *, as_it_is: bool, positions: int, context: int) -> Pair:
    """Write a copy of the demo pair to `out`, widened unless `as_it_is`.

    Its configs allow at least `positions` tokens. `context`: tokens of the longest prompt; if the
    pair was not trained on so many, its name says that drafts are noise.
    """
    target, drafter = (None if as_it_is else shape for shape in (WIDE_TARGET, WIDE_DRAFTER))
    pair = widened_demo(demo, out, target, drafter, positions)
    name = pair.name
    config = json.loads((demo / "target" / "config.json").read_text())
    if positions > config["max_position_embeddings"]:
        name += f", {positions:,} positions"
    if context > TRAINED_ON:
        name += f"; trained on {TRAINED_ON} tokens at a time: beyond, texts and drafts are noise"
    return replace(pair, name=name)


def widened_demo(
    demo: Path,
    out: Path,
    target: Shape | None = WIDE_TARGET,
    drafter: Shape | None = WIDE_DRAFTER,
    positions: int = 0,
) -> Pair:
    """Widen the demo pair to the cost of a larger one, without changing what it computes.

    The result is cached in `out`. Sizes are as for `widen_pair`.
    """
    if not (demo / "target").is_dir():
        raise ValueError(
            f"there is no demo pair in {demo}. Leave out --demo to use the one in this package, or"
            " pass --target and --drafter."
        )
    sizes = target, drafter, positions
    digest = hashlib.sha256(repr(sizes).encode())
    for file in sorted([Path(widen.__file__), *demo.glob("target/*"), *demo.glob("drafter/*")]):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    wide = out / "widened"
    stamp = wide / "made_from"
    if not stamp.is_file() or stamp.read_text() != digest.hexdigest():
        stamp.unlink(missing_ok=True)  # so that an interrupted widening is not taken for done
        widen_pair(demo, wide, *sizes)
        stamp.write_text(digest.hexdigest())
    name = "demo pair as it is"
    if target and drafter:
        layers = f"{target.layers} and {drafter.layers} layers"
        name = f"demo pair widened to {layers} of width {target.hidden}"
    return Pair(str(wide / "target"), str(wide / "drafter"), name)


def with_random_drafter(pair: Pair, out: Path) -> Pair:
    """Replace the pair's drafter by a copy with random weights, whose drafts are useless."""
    source, goal = Path(pair.drafter), out / "random_drafter"
    if not source.is_dir():
        raise ValueError(f"--random-drafter needs the drafter in a folder; {source} is not one.")
    shutil.rmtree(goal, ignore_errors=True)  # a copy of another drafter may have other files
    shutil.copytree(source, goal)
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
