"""Every stage of `benchmarks/parity`, on recordings with one planted fault each; no engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parity.compare_recordings import compare, count_matches, gap_to_best, relative_error
from parity.oracle import Oracle
from parity.recorder import DraftStep, Recording
from support.pairs import Pair, make_pair

PROMPT_LENGTH, NEW_TOKENS = 40, 12
MIXED: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 20,
}


def write(oracle: Oracle, prompt: list[int], new_tokens: int) -> list[int]:
    """Return the prompt and its greedy continuation."""
    ids = list(prompt)
    for _ in range(new_tokens):
        logits, _ = oracle.text(ids, [0])
        ids.append(int(logits[-1].argmax()))
    return ids


@torch.inference_mode()
def simulate(oracle: Oracle, ids: list[int], prompt_length: int) -> Recording:
    """Draft along a text like an engine that computes what this oracle computes."""
    drafter, target = oracle.drafter, oracle.target
    spec = drafter.spec
    _, features = oracle.text(ids, spec.taps)
    z = drafter.context(features)
    steps: list[DraftStep] = []
    length = prompt_length
    while (k := min(spec.max_draft_tokens, len(ids) - length - 2)) > 0:
        block = torch.tensor([ids[length], *[spec.mask_token_id] * k])
        embedding = drafter.embed(block, target)
        layers, hidden = oracle.block(embedding, z[:length])
        logits = drafter.logits(hidden[1:], target)
        drafts = drafter.target_ids(logits.argmax(-1))
        accepted = count_matches(drafts, ids[length + 1 : length + 1 + k])
        positions = torch.arange(length, length + k + 1)
        steps.append(
            DraftStep(
                length, block, positions, embedding, layers, hidden, logits, drafts, k, accepted
            )
        )
        length += 1 + accepted
    return Recording(ids, prompt_length, features, z, torch.arange(len(ids)), steps, "v1")


def oracle_of(pair: Pair) -> Oracle:
    return Oracle(pair.load_target(), pair.load_drafter())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), **MIXED)


@pytest.fixture(scope="module")
def ids(pair: Pair) -> list[int]:
    return write(oracle_of(pair), [3 * i % 300 for i in range(PROMPT_LENGTH)], NEW_TOKENS)


@pytest.fixture
def recording(pair: Pair, ids: list[int], tmp_path: Path) -> Recording:
    """Return what a faultless engine records, loaded from a file."""
    written = dict(vars(simulate(oracle_of(pair), ids, PROMPT_LENGTH)))
    asked = {name: written.pop(name) for name in ("token_ids", "prompt_length")}
    steps = [vars(step) for step in written["steps"]]
    torch.save({**written, "steps": steps}, tmp_path / "recording")
    return Recording.load(tmp_path / "recording", **asked)


def test_a_faultless_engine(pair: Pair, recording: Recording) -> None:
    report = compare([recording], oracle_of(pair))
    assert report.is_equal
    assert report.culprit is report.cause is None
    assert len(report.acceptance[0].engine) > 3
    assert max(max(stage.alone, stage.end_to_end) for stage in report.stages) < 1e-5


def test_drafts_that_were_thrown_away_are_a_difference(pair: Pair, recording: Recording) -> None:
    """Only their number is recorded, and it is summed over all prompts."""
    lossy = [replace(recording, nan_drafts=count) for count in (2, 3)]
    report = compare(lossy, oracle_of(pair))
    assert (report.nan_drafts, report.culprit, report.is_equal) == (5, None, False)
    assert "not finite" in str(report.cause)


def spoil(what: str, recording: Recording, step: DraftStep) -> None:
    """Plant one fault in a recording, or in one of its steps."""
    match what:
        case "tap":
            recording.features[30, 64] += 1.0
        case "context":
            recording.positions[5] = 6  # nothing is left of position 5
        case "Z":
            recording.z[7] *= 1.01
        case "bonus":
            step.input_ids[0] += 1
        case "positions":
            step.positions += 1
        case "NaN":
            step.layers[1][0, 0] = torch.nan
        case "norm":
            step.hidden[2, 3] += 0.01
        case "logits":
            step.logits.mul_(3)
        case "head":
            step.logits.copy_(step.logits.roll(1, dims=0))
        case "drafts":
            step.drafts[1] += 1
        case "lost drafts":
            step.num_accepted = -1


@pytest.mark.parametrize(
    ("what", "tolerance", "culprit", "cause"),
    [
        ("tap", None, "tap of layer 2", "taps off by one"),
        ("context", None, "context rows", "without some of its context"),
        ("Z", None, "context Z", "hidden_norm"),
        ("bonus", None, "block rows", "bonus token"),
        ("positions", None, "block rows", "positions"),
        ("NaN", None, "layer 1", "NaN or infinite numbers"),
        ("norm", None, "final norm", "final norm"),
        ("logits", None, "logits", "logit scale"),
        ("head", None, "logits", "rows other than the masks"),
        ("drafts", None, "drafts", "d2t"),
        ("lost drafts", None, "acceptance", "others were verified"),
        # Rows are right or wrong, not rounded, whatever is tolerated.
        ("context", 0.5, "context rows", "without some of its context"),
        ("bonus", 0.5, "block rows", "bonus token"),
        ("drafts", 0.5, "drafts", "d2t"),
    ],
)
def test_a_spoilt_value_is_found(
    pair: Pair, recording: Recording, what: str, tolerance: float | None, culprit: str, cause: str
) -> None:
    spoil(what, recording, recording.steps[1])
    report = compare([recording], oracle_of(pair), tolerance=tolerance)
    first = next(stage for stage in report.stages if stage.name == culprit)
    assert (first.prompt, first.step) == (0, 0 if "context" in culprit or "tap" in culprit else 1)
    assert (report.culprit, report.is_equal) == (culprit, False)
    assert report.cause is not None
    assert cause in report.cause


def test_a_target_that_writes_something_else(pair: Pair, ids: list[int]) -> None:
    other = [*ids[:-1], (ids[-1] + 1) % 300]
    report = compare([simulate(oracle_of(pair), other, PROMPT_LENGTH)], oracle_of(pair))
    assert report.culprit == "text"


@pytest.mark.parametrize(
    ("what", "mistaken", "culprit"),
    # test_parity.py of tests/engine plants the other kinds in engines.
    [("windows", (None, None), "layer 0"), ("causal", (True, True), "layer 1")],
)
def test_a_mistaken_drafter_is_found(
    pair: Pair, ids: list[int], what: str, mistaken: Any, culprit: str
) -> None:
    """It is found where it is made; later stages only inherit it."""
    oracle = oracle_of(pair)
    oracle.drafter.spec = oracle.drafter.spec.model_copy(update={what: mistaken})
    report = compare([simulate(oracle, ids, PROMPT_LENGTH)], oracle_of(pair))
    assert report.culprit == culprit
    assert report.cause is not None
    assert report.cause.startswith("rope layout, theta or scaling")
    final_norm, logits = (s for s in report.stages if s.name in ("final norm", "logits"))
    assert final_norm.end_to_end > 1e-3 > 1e-5 > final_norm.alone
    assert logits.end_to_end > 1e-3 > 1e-5 > logits.alone


def test_errors_are_relative_to_the_row() -> None:
    expected = torch.tensor([[1000.0, 0.0], [1.0, 2.0], [0.0, 0.0]])
    got = expected.clone()
    assert relative_error(got, expected) == 0
    got[1, 0] = 1.5
    assert relative_error(got, expected) == 0.25
    got[2, 0] = 1.0  # zeros were expected: a large but finite error
    assert 1e6 < relative_error(got, expected) < torch.inf
    got[0, 0] = torch.nan
    assert relative_error(got, expected) == torch.inf
    logits = torch.tensor([[1.0, 4.0, 3.0], [2.0, 2.0, 1.0]])
    assert gap_to_best(logits, torch.tensor([2, 1])) == 0.25
    assert gap_to_best(logits, torch.tensor([1, 0])) == 0


def test_an_oracle_loads_what_is_on_disk(pair: Pair) -> None:
    oracle = Oracle.load(str(pair.target), str(pair.drafter), torch.bfloat16)
    assert oracle.target.dtype == oracle.drafter.fc.weight.dtype == torch.bfloat16
    # Positions are exact in any dtype.
    both: list[list[Any]] = [[*oracle.drafter.layers], [*pair.load_drafter().layers]]
    for layer, exact in zip(*both, strict=True):
        assert torch.equal(layer.rotary.inv_freq, exact.rotary.inv_freq)
