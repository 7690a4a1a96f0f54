"""Widened pairs compute what the originals compute."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from support import DEMO
from support.pairs import Pair, dflash2_config, make_pair
from support.reference_decoding import block_states, generate
from vllm_dflash.checkpoint.headers import read_folder
from vllm_dflash.checkpoint.read import read_drafter
from vllm_dflash.checkpoint.tensors import check_tensors
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


@pytest.mark.parametrize(
    ("target", "drafter", "message"),
    [
        ({"hidden": 4096}, {}, "shares its target's hidden size"),
        ({"hidden": 512}, {"hidden": 512}, "power of four"),
        ({"heads": 16}, {}, "query heads"),
        ({"intermediate": 512}, {}, "cannot widen"),
        ({"layers": 5}, {}, "6 layers cannot become 5"),
        ({}, {"layers": 4}, "no identity layers"),
    ],
)
def test_shapes_that_cannot_be(
    tmp_path: Path, target: dict[str, int], drafter: dict[str, int], message: str
) -> None:
    shapes = (Shape(**vars(TARGET) | target), Shape(**vars(DRAFTER) | drafter))
    with pytest.raises(ValueError, match=message):
        widen_pair(DEMO, tmp_path, *shapes)
    assert not list(tmp_path.iterdir())


def test_layers_with_a_window_are_refused(tmp_path: Path) -> None:
    pair = make_pair(
        tmp_path / "pair",
        layer_types=["sliding_attention", "full_attention"],
        dflash_config={"swa_window_size": 16},
    )
    same = Shape(hidden=64, intermediate=96, heads=4, kv_heads=2, layers=4)
    drafter = Shape(hidden=64, intermediate=96, heads=4, kv_heads=2, layers=2)
    with pytest.raises(ValueError, match="sliding window"):
        widen_pair(pair.target.parent, tmp_path / "wide", same, drafter)


def test_missing_demo_pair_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--target and --drafter"):
        widened_demo(tmp_path / "nowhere", tmp_path)


def test_the_demo_pair_is_widened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    widened: list[Path] = []
    demo = tmp_path / "demo"
    for name in ("target", "drafter"):
        (demo / name).mkdir(parents=True)
        (demo / name / "config.json").write_text(name)

    def widen(demo: Path, out: Path, *sizes: object) -> None:
        out.mkdir(parents=True, exist_ok=True)
        widened.append(out)

    monkeypatch.setattr("vllm_dflash.tools.bench.bench_pair.widen_pair", widen)
    first, again = (widened_demo(demo, tmp_path / "out") for _ in range(2))
    assert first == again
    assert widened == [tmp_path / "out" / "widened"]
    (demo / "drafter" / "config.json").write_text("another")
    widened_demo(demo, tmp_path / "out")
    assert len(widened) == 2


def test_a_widening_that_was_interrupted_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the pair is again the one that was widened before."""
    widen = "vllm_dflash.tools.bench.bench_pair.widen_pair"
    config = tmp_path / "demo" / "target" / "config.json"
    config.parent.mkdir(parents=True)
    (tmp_path / "widened").mkdir()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    config.write_text("one")
    monkeypatch.setattr(widen, lambda *_: None)
    widened_demo(tmp_path / "demo", tmp_path)
    config.write_text("another")
    monkeypatch.setattr(widen, interrupted)
    with pytest.raises(KeyboardInterrupt):
        widened_demo(tmp_path / "demo", tmp_path)
    config.write_text("one")
    with pytest.raises(KeyboardInterrupt):  # it is widened again
        widened_demo(tmp_path / "demo", tmp_path)


def test_a_dflash2_drafter_predicts_the_same(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, **dflash2_config())
    shape = Shape(hidden=256, intermediate=128, heads=8, kv_heads=4, layers=4)
    widen_pair(tmp_path, tmp_path / "wide", shape, replace(shape, layers=2))
    wide = pair_in(tmp_path / "wide")
    check_tensors(wide.spec, read_folder(wide.drafter).tensors)
    features = torch.randn(9, 2, 64)
    padded = torch.nn.functional.pad(features, (0, 192))  # zeros after each tap
    expected = block_states(pair.load_target(), pair.load_drafter(), features.flatten(1), 3, 7)
    found = block_states(wide.load_target(), wide.load_drafter(), padded.flatten(1), 3, 7)
    torch.testing.assert_close(found[:, :64], expected, atol=1e-4, rtol=1e-4)
    assert not found[:, 64:].any()
