"""The gate on real engines: a clean one passes, and faults planted in acceptance are caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.sample import rejection_sampler

from support.engines import FIXED, TARGET, engine, held_out_prompts
from vllm_dflash.tools.engine_answers import EngineAnswers, Request, complete
from vllm_dflash.tools.verify.gate import GateSettings, verify
from vllm_dflash.tools.verify.verification import Verification
from vllm_dflash.tools.verify.verify_command import open_side

PROMPTS = held_out_prompts(8)
SETTINGS = GateSettings(concurrency=(2, 8), tokens=32)
PLACEHOLDER = -1

Gate = Callable[..., Verification]
Accept = Callable[[list[int], list[int], list[int]], list[int]]
"""From a request's drafts, the target's choice after each token it was given, and the correct
tokens, to other tokens."""


def one_too_many(drafts: list[int], choices: list[int], sound: list[int]) -> list[int]:
    accepted = len(sound) - 1
    if accepted == len(drafts):
        return sound
    return [*sound[:accepted], drafts[accepted], choices[accepted + 1]]


def unverified(drafts: list[int], choices: list[int], sound: list[int]) -> list[int]:
    return [*drafts, choices[len(drafts)]]


def plant(monkeypatch: pytest.MonkeyPatch, accept: Accept) -> None:
    """Make engines of this process accept by another rule."""
    original = rejection_sampler.rejection_sample

    def rejection_sample(*given: Any, **named: Any) -> torch.Tensor:
        output = original(*given, **named)
        draft_token_ids, num_draft_tokens, _, _, _, target_logits, bonus_token_ids, *_ = given
        drafts = draft_token_ids.split(num_draft_tokens)
        choices = target_logits.argmax(-1).split(num_draft_tokens)
        for row, own, theirs, bonus in zip(output, drafts, choices, bonus_token_ids, strict=True):
            sound = row[row != PLACEHOLDER].tolist()
            tokens = accept(own.tolist(), [*theirs.tolist(), int(bonus)], sound)
            row.fill_(PLACEHOLDER)
            row[: len(tokens)] = torch.tensor(tokens, dtype=row.dtype)
        return output

    monkeypatch.setattr(rejection_sampler, "rejection_sample", rejection_sample)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineAnswers]:
    flags = ("--enforce-eager", "--max-model-len", "512", "--block-size", "32")
    log = tmp_path_factory.mktemp("plain") / "log"
    with open_side(str(TARGET), None, log, flags=flags, dtype="float32") as answers:
        yield answers


@pytest.fixture(scope="module")
def dflash() -> Iterator[EngineAnswers]:
    with engine(speculative_config=dict(FIXED), max_num_seqs=8) as llm:
        yield EngineAnswers(llm.llm_engine)


@pytest.fixture
def gate(plain: EngineAnswers, dflash: EngineAnswers) -> Gate:
    """The gate on running engines: these look up the planted rule in every step."""

    def verify_demo(**changes: Any) -> Verification:
        return verify(
            PROMPTS,
            lambda: nullcontext(dflash),
            lambda: nullcontext(plain),
            replace(SETTINGS, **changes),
        )

    return verify_demo


def test_float32_is_lossless(gate: Gate) -> None:
    result = gate()
    assert result.verdict == "lossless"
    assert result.tie == 0
    for level in result.levels:
        assert level.identical == len(PROMPTS)
        assert level.acceptance_length is not None
        assert level.acceptance_length > 2


@pytest.mark.parametrize("fault", [one_too_many, unverified])
def test_a_planted_fault_is_caught(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, fault: Accept
) -> None:
    plant(monkeypatch, fault)
    result = gate()
    assert (result.verdict, result.exit_code) == ("regression", 1)
    for level in result.levels:
        assert level.with_regressions == len(PROMPTS)
        # Not only the first of each text: there is one in nearly every step.
        assert level.regressions > 4 * len(PROMPTS)
        assert level.worst is not None
        assert level.worst.regret > 1


def test_a_close_second_is_a_tie(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the second best token of a row if it is this close, as rounding might."""
    close = 0.1
    original = rejection_sampler.rejection_sample

    def rejection_sample(*arguments: Any, **named: Any) -> torch.Tensor:
        before, logits, after = arguments[:5], arguments[5].clone(), arguments[6:]
        best, second = logits.topk(2).indices.unbind(-1)
        rows = torch.arange(len(logits))
        change = logits[rows, best] - logits[rows, second] < close
        logits[rows[change], best[change]] -= 2 * close
        return original(*before, logits, *after, **named)

    monkeypatch.setattr(rejection_sampler, "rejection_sample", rejection_sample)
    result = gate(tie=0.2)
    assert result.verdict == "lossless"
    for level in result.levels:
        assert level.regressions == 0
        assert level.ties > level.with_ties > 0  # it continues after the first
        assert level.worst is not None
        assert 0 < level.worst.regret < close + 1e-3


def test_regret_is_that_of_the_full_distribution(plain: EngineAnswers) -> None:
    """For several requests at once, scored ones among others."""
    (prompt,) = plain.encode(texts=PROMPTS[:1])
    tokens = list(range(5, 25))
    requests = [Request(prompt, 1, token) for token in tokens] + [Request(prompt, 6)]
    *scored, written = complete(plain, requests, 32)
    assert len(written.tokens) == 6
    assert written.regret is None
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(Path(TARGET), dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    expected = (logits.max() - logits[tokens]).tolist()
    assert [one.regret for one in scored] == pytest.approx(expected, abs=1e-3)
    assert {one.tokens[0] for one in scored} == {int(logits.argmax())} == {written.tokens[0]}


def test_concurrency_is_exact(
    plain: EngineAnswers, dflash: EngineAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It limits the requests in flight, whatever the engine could take."""
    in_flight = []
    engine = dflash._engine
    step = engine.step

    def counted() -> Any:
        in_flight.append(engine.get_num_unfinished_requests())
        return step()

    monkeypatch.setattr(engine, "step", counted)
    requests = [Request(tokens, 16 + i) for i, tokens in enumerate(dflash.encode(PROMPTS[:7]))]
    finished = complete(dflash, requests, 3)
    assert max(in_flight) == 3
    assert in_flight.count(3) > len(in_flight) / 2
    assert finished == complete(plain, requests, 1)


def test_facts(plain: EngineAnswers, dflash: EngineAnswers) -> None:
    ours, theirs = dflash.facts(), plain.facts()
    assert (ours["stop_tokens"], ours["dtype"], ours["max_model_len"]) == ([0], "float32", 512)
    assert (ours["max_num_seqs"], theirs["drafter"]) == (8, None)
    assert theirs["max_model_len"] == 512
    assert ours["drafter"] is not None
    assert ours["drafter"].startswith("vllm-dflash ")
    assert plain.counts() == {}
    assert plain.decode(tokens=plain.encode(texts=["return self"])[0])[-1] == " self"
