"""Widened pairs compute what the originals compute."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from support import DEMO
from support.pairs import Pair
from support.reference_decoding import generate
from vllm_dflash.checkpoint.read import read_drafter
from vllm_dflash.tools.bench.bench_pair import widened_demo
from vllm_dflash.tools.bench.widen import Shape, widen_pair

TARGET = Shape(hidden=1024, intermediate=1024, heads=8, kv_heads=4, layers=8)
DRAFTER = Shape(hidden=1024, intermediate=896, heads=8, kv_heads=4, layers=3)


def pair_in(folder: Path) -> Pair:
    drafter = folder / "drafter"
    return Pair(folder / "target", drafter, read_drafter(str(drafter)))


@pytest.fixture(scope="module")
def demo() -> Pair:
    return pair_in(DEMO)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = Path(tmp_path_factory.mktemp("wide"))
    widen_pair(DEMO, folder, TARGET, DRAFTER)
    return pair_in(folder)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    with (DEMO / "held_out.jsonl").open() as file:
        return [tokenizer.encode(json.loads(next(file))["prompt"]) for _ in range(4)]


@torch.inference_mode()
def test_target_predicts_the_same(demo: Pair, wide: Pair, prompts: list[list[int]]) -> None:
    small, large = demo.load_target(), wide.load_target()
    for prompt in prompts:
        token_ids = torch.tensor([prompt])
        expected, found = small(token_ids).logits, large(token_ids).logits
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_drafts_are_the_same(demo: Pair, wide: Pair, prompts: list[list[int]]) -> None:
    found = {}
    for pair in (demo, wide):
        target, drafter = pair.load_target(), pair.load_drafter().float()
        found[pair.target] = [generate(target, drafter, prompt, 24) for prompt in prompts[:2]]
    assert found[demo.target] == found[wide.target]
    lengths = [length for one in found[demo.target] for length in one.acceptance_lengths]
    assert sum(lengths) / len(lengths) > 1.5  # so they are drafts worth comparing


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record what is widened, by its config; "broken" is interrupted."""
    configs: list[str] = []

    def widen(demo: Path, out: Path, *_: object) -> None:
        configs.append((demo / "target" / "config.json").read_text())
        out.mkdir(parents=True, exist_ok=True)
        if configs[-1] == "broken":
            raise KeyboardInterrupt

    monkeypatch.setattr("vllm_dflash.tools.bench.bench_pair.widen_pair", widen)
    (tmp_path / "demo" / "target").mkdir(parents=True)
    return configs


def test_the_demo_pair_is_widened_once(tmp_path: Path, asked: list[str]) -> None:
    """Unless it changed, or was not done: even if it is again the one that was widened before."""
    for config in ("one", "one", "another", "broken", "one"):
        (tmp_path / "demo" / "target" / "config.json").write_text(config)
        with suppress(KeyboardInterrupt):
            widened_demo(tmp_path / "demo", tmp_path / "out")
    assert asked == ["one", "another", "broken", "one"]
