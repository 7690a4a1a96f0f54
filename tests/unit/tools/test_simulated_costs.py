"""`bench --simulate-costs`: recorded drafts decoded under another machine's costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import ROOT
from support.pairs import make_pair
from vllm_dflash.model.reference_decoding import generate
from vllm_dflash.tools.parity.oracle import Oracle
from vllm_dflash.tools.simulate.cost_table import CostTable
from vllm_dflash.tools.simulate.recorded_texts import RecordedText, record
from vllm_dflash.tools.simulate.simulate_command import HEADS, compare
from vllm_dflash.tools.simulate.simulated_decoding import SimulatedDecoding, decode

GPU = CostTable.read(ROOT / "benchmarks" / "costs" / "assumed_gpu.json")
CPU = CostTable.read(ROOT / "benchmarks" / "costs" / "cpu_2_cores.json")
WIDTH, CHANCES = 7, np.array([0.5, 0.25, 0.1, 0.05])


def text(seed: int, chances: np.ndarray = CHANCES, length: int = 120) -> RecordedText:
    """Of a drafter that is right as often as it says."""
    dice = np.random.default_rng(seed)
    tokens = dice.integers(1000, 2000, length)
    candidates = dice.integers(0, 1000, (length - 1, WIDTH, len(chances)))  # all wrong
    for anchor in range(length - 1):
        for place in range(min(WIDTH, length - 1 - anchor)):
            rank = int(np.searchsorted(np.cumsum(chances), dice.random()))
            if rank < len(chances):
                candidates[anchor, place, rank] = tokens[anchor + 1 + place]
    shape = (length - 1, WIDTH, 1, len(chances))
    return RecordedText(20, tokens.tolist(), candidates, np.broadcast_to(chances, shape).copy())


TEXTS = [text(seed) for seed in range(12)]


@pytest.mark.parametrize(("requests", "least", "most"), [(1, 1.15, 2.0), (32, 0.98, 1.3)])
def test_trees_pay_where_rows_are_nearly_free(requests: int, least: float, most: float) -> None:
    chains, trees = (decode(TEXTS, GPU, requests, 250, **kind) for kind in ({"nodes": 0}, {}))
    assert least < trees.tokens_per_second / chains.tokens_per_second < most
    assert trees.verified > chains.verified
    assert trees.accepted > chains.accepted


@pytest.mark.parametrize("requests", [1, 4, 8])
def test_where_rows_are_dear_trees_are_small_and_lose_nothing(requests: int) -> None:
    chains, trees = (decode(TEXTS, CPU, requests, 250, **kind) for kind in ({"nodes": 0}, {}))
    assert trees.tokens_per_second > 0.98 * chains.tokens_per_second
    assert trees.verified < 7


@pytest.mark.parametrize("nodes", [0, 32])
def test_useless_drafts_cost_next_to_nothing(nodes: int) -> None:
    useless = [text(seed, np.array([1e-3])) for seed in range(4)]
    found = decode(useless, CPU, 8, 300, nodes=nodes)
    assert found.accepted < 0.01
    assert found.plain == pytest.approx(8 / 21.3e-3)
    assert found.tokens_per_second > 0.97 * found.plain


@pytest.mark.parametrize("nodes", [0, 32])
def test_texts_are_decoded_to_their_ends_and_no_further(nodes: int) -> None:
    run = SimulatedDecoding(TEXTS, GPU, 3, nodes)
    ends, steps = [], []
    for _ in range(400):
        before = {one.name: one for one in run.running}
        steps.append(run.step())
        now = {one.name for one in run.running}
        ends += [one.at for name, one in before.items() if name not in now]
    assert len(ends) > 10
    assert set(ends) == {len(TEXTS[0].tokens) - 1}
    assert sum(step.produced.sum() - step.accepted.sum() for step in steps) == 3 * 400


def test_a_table_says_what_was_asked() -> None:
    table = compare(TEXTS, GPU, [1, 4])
    assert table.columns == HEADS
    assert [row[0] for row in table.rows] == ["1", "4"]
    chains, trees, ratio = map(float, table.rows[0][1:4])
    assert ratio == pytest.approx(trees / chains, abs=0.01)


@pytest.mark.parametrize("changes", [{}, {"conv_kernel_size": 3}], ids=["dflash", "dflash2"])
def test_what_is_recorded_is_what_the_drafter_drafts(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Along the likeliest tokens; and the text is the target's."""
    own: dict[str, Any] = {}
    if changes:
        nested = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6}
        own = {"architectures": ["DFlash2DraftModel"]}
        own["dflash_config"] = {**nested, "selector_top_k": 5}
    pair = make_pair(tmp_path, **own)
    oracle = Oracle(pair.load_target(), pair.load_drafter())
    prompt = list(range(5, 25))
    told: list[float] = []
    (found,) = record(oracle, [prompt], 10, told.append)
    assert told == [1]
    expected = generate(oracle.target, oracle.drafter, prompt, 10)
    assert found.tokens == expected.tokens
    assert found.prompt_length == 20
    assert found.candidates.shape[:2] == (9, 7)
    assert found.chances.sum(axis=-1).max() <= 1 + 1e-5
    # Decoding the record by chains of the likeliest accepts what the reference accepts.
    at, lengths = 0, []
    while len(found.tokens) - 1 - at > 1:
        wide = min(7, len(found.tokens) - 1 - at - 1)
        accepted, before = 0, 0
        for place in range(wide):
            before = int(found.chances[at, place, before].argmax())
            if found.candidates[at, place, before] != found.tokens[at + 1 + place]:
                break
            accepted += 1
            before = before if found.chances.shape[2] > 1 else 0
        lengths.append(1 + accepted)
        at += 1 + accepted
    assert lengths == expected.acceptance_lengths


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"verify_ms": {"1": 3.0}}, "two points"),
        ({"verify_ms": {"1": 3.0, "8": 2.0}}, "more rows"),
        ({"draft_ms": {"1": -1.0, "8": 2.0}}, "greater than 0"),
        ({"drafts": {}}, "drafts"),
        ({"name": None}, "name"),
    ],
)
def test_a_file_that_is_no_table_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    written = json.loads(GPU.model_dump_json()) | changes
    (tmp_path / "costs.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=words):
        CostTable.read(tmp_path / "costs.json")
    with pytest.raises(ValueError, match="No such file"):
        CostTable.read(tmp_path / "missing.json")
