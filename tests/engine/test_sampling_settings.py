"""Requests get from DFlash what plain vLLM gives them, whatever they ask for, all at once."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

import pytest
from vllm import LLM, RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from support.engines import DFLASH, USES_V2, engine, fix_costs, greedy, held_out_prompts

pytestmark = pytest.mark.usefixtures("runner")
# Triton's interpreter takes ten times as long, so Model Runner V2 gets less to do.
TOKENS = 10 if USES_V2 else 32
PROMPTS = held_out_prompts(24)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": [1, 20, 300]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
PATTERN = r"def [a-z_]{3,12}\(self, [a-z]{1,8}\):"


def grammar(tokens: int = 2 * TOKENS, **what: object) -> SamplingParams:
    return greedy(tokens, structured_outputs=StructuredOutputsParams(**what))


GREEDY: dict[str, list[SamplingParams]] = {
    "plain": [greedy(TOKENS)] * 3,
    "max_tokens within a block": [greedy(count) for count in range(1, 10)],
    "stop strings": [greedy(TOKENS, stop=[text]) for text in ("(", "se", ":\n")],
    "stop strings kept": [
        greedy(TOKENS, stop=[text], include_stop_str_in_output=True) for text in (")", "self")
    ],
    "stop tokens": [greedy(TOKENS, stop_token_ids=list(ids)) for ids in (range(9, 90), (260, 300))],
    "ignore_eos": [greedy(TOKENS, ignore_eos=True)] * 3,
    "min_tokens": [
        greedy(TOKENS, stop_token_ids=list(range(9, 60)), min_tokens=count) for count in (3, 10)
    ],
    "logprobs": [greedy(TOKENS, logprobs=count) for count in (0, 3)],
    "prompt_logprobs": [greedy(TOKENS, prompt_logprobs=2, logprobs=2)],
    "bad_words": [greedy(TOKENS, bad_words=words) for words in (["self"], ["def", "return x"])],
    "allowed_token_ids": [greedy(TOKENS, allowed_token_ids=list(range(10, 500)))],
    "repetition_penalty": [greedy(TOKENS, repetition_penalty=value) for value in (1.2, 1.7)],
    "presence_penalty": [greedy(TOKENS, presence_penalty=1.1)],
    "frequency_penalty": [greedy(TOKENS, frequency_penalty=0.9)],
    "json schema": [grammar(json=SCHEMA)],
    "regex": [grammar(regex=PATTERN)],
    "choice": [grammar(choice=["import os", "import sys", "raise ValueError"])],
    "all together": [
        greedy(
            TOKENS,
            stop=["(("],
            min_tokens=7,
            logprobs=1,
            bad_words=["self"],
            repetition_penalty=1.1,
            presence_penalty=0.3,
            frequency_penalty=0.2,
        )
    ],
}
SAMPLED = {
    "seed": [SamplingParams(temperature=0.8, seed=seed, max_tokens=TOKENS) for seed in (1, 2)],
    "seed and n": [SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=TOKENS)],
    "seed and penalties": [
        SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.2, max_tokens=TOKENS)
    ],
}
if USES_V2:  # test_crossed_requests.py has the others
    GREEDY = {name: GREEDY[name][-1:] for name in ("plain", "logprobs", "all together")}
    SAMPLED = {"seed": SAMPLED["seed"][:1] + SAMPLED["seed and penalties"]}
else:  # the interpreter cannot run V2's kernel for top-k
    GREEDY["n"] = [SamplingParams(n=3, top_k=1, max_tokens=TOKENS)]
    SAMPLED["seed, top-k and top-p"] = [
        SamplingParams(temperature=0.9, seed=5, top_k=50, top_p=0.9, max_tokens=TOKENS)
    ]
EVERYTHING = [(name, one) for name, params in (GREEDY | SAMPLED).items() for one in params]


@dataclass
class Completion:
    """One sequence as a user sees it."""

    tokens: list[int]
    text: str
    ended: tuple[str | None, int | str | None]
    logprobs: list[dict[int, float]]
    prompt_logprobs: list[dict[int, float]]


def completions(output: RequestOutput) -> list[Completion]:
    def values(given: list | None) -> list[dict[int, float]]:
        return [{i: one.logprob for i, one in (row or {}).items()} for row in given or []]

    return [
        Completion(
            list(one.token_ids),
            one.text,
            (one.finish_reason, one.stop_reason),
            values(one.logprobs),
            values(output.prompt_logprobs),
        )
        for one in output.outputs
    ]


def run(llm: LLM, *names: str) -> dict[str, list[Completion]]:
    """Run the settings of these names in one batch, kinds mixed; return the results by setting."""
    asked = [
        (name, params, prompt)
        for (name, params), prompt in zip(EVERYTHING, itertools.cycle(PROMPTS), strict=False)
        if name in names
    ]
    order = [asked[i] for start in range(5) for i in range(start, len(asked), 5)]
    outputs = llm.generate([one[2] for one in order], [one[1] for one in order], use_tqdm=False)
    found: dict[str, list[Completion]] = {}
    for (name, *_), output in zip(order, outputs, strict=True):
        found.setdefault(name, []).extend(completions(output))
    return found


@dataclass
class Runs:
    plain: dict[str, list[Completion]]
    ours: dict[str, list[Completion]]
    seeded: list[dict[str, list[Completion]]]
    """Sampled requests without the others, before and after; only at a fixed length."""
    refusals: dict[str, str]
    stats: dict[str, Any]


REFUSED = {"min_p": SamplingParams(min_p=0.1), "logit_bias": greedy(4, logit_bias={5: 3.0})}
DRAFT_LENGTHS = ["fixed"] if USES_V2 else ["fixed", "adaptive"]
at_a_fixed_length = pytest.mark.parametrize("runs", ["fixed"], indirect=True)


def refusal(llm: LLM, params: SamplingParams) -> str:
    with pytest.raises(VLLMValidationError) as refused:
        llm.generate(PROMPTS[0], params, use_tqdm=False)
    return str(refused.value)


@pytest.fixture(scope="module", params=DRAFT_LENGTHS)
def runs(request: pytest.FixtureRequest, plain: dict[str, list[Completion]]) -> Runs:
    with pytest.MonkeyPatch.context() as patch:
        fix_costs(patch)
        speculative = {**DFLASH, "draft_length": request.param}
        with engine(speculative_config=speculative, max_num_seqs=8) as llm:
            seeded = [run(llm, *SAMPLED)] if request.param == "fixed" else []
            ours = run(llm, *GREEDY, *SAMPLED)
            seeded += [run(llm, *SAMPLED)] if request.param == "fixed" else []
            refusals = {name: refusal(llm, params) for name, params in REFUSED.items()}
            (stats,) = llm.collective_rpc("dflash_stats")
    return Runs(plain, ours, seeded, refusals, stats)


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Completion]]:
    with engine(max_num_seqs=8) as llm:
        return run(llm, *GREEDY)


@pytest.mark.parametrize("setting", GREEDY)
def test_output_is_plain_vllms(runs: Runs, setting: str) -> None:
    assert runs.stats["accepted_tokens"] > 0
    for ours, expected in zip(runs.ours[setting], runs.plain[setting], strict=True):
        assert ours.tokens == expected.tokens
        assert ours.text == expected.text
        assert ours.ended == expected.ended


@pytest.mark.parametrize(
    "setting", sorted({"logprobs", "prompt_logprobs", "all together"} & {*GREEDY})
)
def test_logprobs_are_plain_vllms(runs: Runs, setting: str) -> None:
    assert runs.stats["captures_after_warmup"] == 0
    for ours, expected in zip(runs.ours[setting], runs.plain[setting], strict=True):
        assert len(ours.logprobs) == len(ours.tokens) > 0
        assert len(ours.prompt_logprobs) == len(expected.prompt_logprobs)
        rows = ours.logprobs + ours.prompt_logprobs
        for got, wanted in zip(rows, expected.logprobs + expected.prompt_logprobs, strict=True):
            assert got == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
def test_the_settings_do_what_they_say(runs: Runs) -> None:
    """Otherwise comparing them would mean nothing."""
    lengths = [len(one.tokens) for one in runs.ours["max_tokens within a block"]]
    assert sorted(lengths) == [*range(1, 10)]
    for name in ("stop strings", "stop tokens", "min_tokens"):
        assert any(one.ended[0] == "stop" for one in runs.ours[name]), name
        assert any(len(one.tokens) % 8 for one in runs.ours[name]), name
    assert not any("self" in one.text for one in runs.ours["bad_words"][:1])
    # This target may write blanks, which the grammar allows, until its tokens are used up.
    assert re.match(r'\{\s*"name"\s*:\s*"', runs.ours["json schema"][0].text)
    assert re.fullmatch(PATTERN, runs.ours["regex"][0].text)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        for one in runs.ours[name]:
            assert max(map(one.tokens.count, one.tokens)) < TOKENS // 2


@at_a_fixed_length
@pytest.mark.parametrize("setting", SAMPLED)
def test_a_seed_gives_the_same_tokens_again(runs: Runs, setting: str) -> None:
    """Requests keep the same neighbours: with others, plain vLLM's tokens differ as well.

    Planned lengths depend on what was accepted before, and so does what a seed draws.
    """
    before, after = ([one.tokens for one in found[setting]] for found in runs.seeded)
    assert before == after
    assert len(set(map(tuple, before))) == len(before)


@at_a_fixed_length
@pytest.mark.parametrize("setting", REFUSED)
def test_what_vllm_refuses_with_speculative_decoding(runs: Runs, setting: str) -> None:
    assert setting in runs.refusals[setting]
    assert "not yet supported with speculative decoding" in runs.refusals[setting]
