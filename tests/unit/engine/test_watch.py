"""Warnings of drafts that are not finite, or never accepted: once, and with what to do."""

from pathlib import Path

import pytest
import torch

from support.engines import FIXED, TARGET, engine, greedy, held_out_prompts, proposer_of, token_ids
from support.pairs import drafter_config, save_drafter
from vllm_dflash.engine.log import logger
from vllm_dflash.engine.statistics import DraftStatistics
from vllm_dflash.engine.watch import ENOUGH_VERIFICATIONS, FIRST_LOOK, LONGEST_INTERVAL, DraftWatch

PROMPTS, PARAMS = held_out_prompts(4), greedy(20)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with engine() as llm:
        return token_ids(llm, PROMPTS, PARAMS)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What our logger warns of. (vLLM drops other people's handlers when an engine starts.)"""
    messages: list[str] = []
    monkeypatch.setattr(logger(), "warning", lambda text, *values: messages.append(text % values))
    return messages


class Watched:
    def __init__(self) -> None:
        self.statistics = DraftStatistics(max_draft=7)
        self.warnings: list[str] = []
        self.watch = DraftWatch(
            lambda: self.statistics,
            lambda text, *values: self.warnings.append(text % values),
            target="T",
            drafter="D",
        )

    def verify(self, times: int, accepted: int) -> None:
        self.statistics.verifications += times
        self.statistics.accepted_tokens += accepted
        self.watch.look()


def test_drafts_that_are_not_finite() -> None:
    watched = Watched()
    watched.watch.look()
    assert watched.warnings == []
    watched.statistics.nan_drafts = 3
    for _ in range(2 * FIRST_LOOK):
        watched.watch.tick()
    (warning,) = watched.warnings
    assert "logits of 3 drafts were not finite" in warning
    assert "vllm-dflash parity D --target T" in warning


def test_looks_become_rare() -> None:
    """Each waits for the device."""
    watched, looks = Watched(), []
    watched.watch.look = lambda: looks.append(step)  # type: ignore[method-assign]
    for step in range(1, 10 * LONGEST_INTERVAL):  # noqa: B007 - the lambda reads it
        watched.watch.tick()
    assert looks[:3] == [FIRST_LOOK, 3 * FIRST_LOOK, 7 * FIRST_LOOK]
    assert looks[-1] - looks[-2] == LONGEST_INTERVAL
    assert len(looks) < 20


def test_acceptance_stuck_at_zero() -> None:
    watched = Watched()
    watched.verify(ENOUGH_VERIFICATIONS - 1, accepted=0)
    assert watched.warnings == []  # too early to tell
    watched.verify(1, accepted=1)
    watched.verify(ENOUGH_VERIFICATIONS, accepted=0)
    (warning,) = watched.warnings
    assert f"of the last {ENOUGH_VERIFICATIONS} verifications 1 were accepted" in warning
    assert "another target" in warning
    assert "thinking mode" in warning
    assert "vllm-dflash parity D --target T" in warning


def test_acceptance_that_stops_after_a_good_start() -> None:
    watched = Watched()
    watched.verify(10_000, accepted=20_000)
    assert watched.warnings == []
    watched.verify(ENOUGH_VERIFICATIONS, accepted=0)
    assert len(watched.warnings) == 1


@pytest.mark.engine
@pytest.mark.usefixtures("runner")
def test_a_broken_drafter_warns_and_harms_nobody(
    plain: list[list[int]], warnings: list[str]
) -> None:
    """Half of its logits are NaN; the output stays plain decoding's."""
    with engine(speculative_config=dict(FIXED), max_num_seqs=4) as llm:
        model = proposer_of(llm).model
        compute = model.compute_logits

        def broken(hidden: torch.Tensor) -> torch.Tensor:
            logits = compute(hidden)
            logits[1::2] = torch.nan
            return logits

        model.compute_logits = broken
        for _ in range(4):
            assert token_ids(llm, PROMPTS, PARAMS) == plain
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["nan_drafts"] > 0
    assert stats["accepted_tokens"] > 0  # of the drafts before a broken one
    assert sum("not finite" in warning for warning in warnings) == 1
    assert f"--target {TARGET}" in warnings[-1]


@pytest.mark.engine
@pytest.mark.usefixtures("runner")
def test_a_drafter_of_another_target_warns(
    tmp_path: Path,
    plain: list[list[int]],
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random weights that fit the demo target's shape."""
    monkeypatch.setattr("vllm_dflash.engine.watch.ENOUGH_VERIFICATIONS", 40)
    config = drafter_config(vocab_size=2048, target_hidden_size=256, hidden_size=256)
    config |= {"num_target_layers": 6}
    save_drafter(tmp_path, config)
    speculative = {**FIXED, "model": str(tmp_path)}
    with engine(speculative_config=speculative, max_num_seqs=4) as llm:
        for _ in range(4):
            assert token_ids(llm, PROMPTS, PARAMS) == plain
    assert sum("0 were accepted" in warning for warning in warnings) == 1
