"""The gate: DFlash writes at every concurrency, plain decoding writes and then judges.

One engine after the other, since on a GPU each of them takes most of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from vllm_dflash.tools.engine_answers import EngineAnswers, Facts, Request, complete
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.verify.divergence import Answer, Divergence, Question, Text, compare_all
from vllm_dflash.tools.verify.verification import Drafting, Level, Verification, describe

OpenEngine = Callable[[], AbstractContextManager[EngineAnswers]]
"""Starts an engine, which ends with the context."""
TIE = 0.20
"""Nat. In bfloat16, logits between 16 and 32 are an eighth apart; so two roundings differ."""
EXACT = "float32"
"""In this dtype greedy texts are identical: nothing is a tie but equal logits."""


@dataclass(frozen=True)
class GateSettings:
    """How to verify."""

    concurrency: tuple[int, ...] = (1, 8, 32)
    tokens: int = 128
    """New tokens a text at most."""
    tie: float | None = None
    """Most regret of a tie, in nat; None: 0.20, in float32 0."""


@dataclass(frozen=True)
class Writing:
    """What DFlash wrote at one concurrency: tokens of each text."""

    concurrency: int
    drafting: Drafting
    texts: list[list[int]]


def verify(
    prompts: Sequence[str],
    open_dflash: OpenEngine,
    open_plain: OpenEngine,
    settings: GateSettings | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Compare DFlash with plain decoding, greedily, token by token.

    Args:
        prompts: what is continued.
        open_dflash: starts the engine to verify.
        open_plain: starts the same one without a speculative config; the other has ended by then.
        settings: (default: `GateSettings()`).
        progress: told what goes on (default: nobody is).

    Raises:
        ValueError: a prompt or a concurrency that the engines cannot take, or engines that say
            nothing about each other.
        EngineDied: an engine in a child process did.
    """
    settings = settings or GateSettings()
    progress = progress or Progress()
    with open_dflash() as dflash:
        with progress.stage("starting DFlash's engine"):
            facts = dflash.facts()
        check_concurrency(settings, facts)
        encoded = dflash.encode(texts=list(prompts))
        limits = text_limits(encoded, settings.tokens, facts["max_model_len"])
        requests = [Request(tokens, limit) for tokens, limit in zip(encoded, limits, strict=True)]
        writings = [_write(dflash, requests, count, progress) for count in settings.concurrency]
    with open_plain() as plain:
        with progress.stage("starting plain decoding's engine"):
            of_plain = plain.facts()
        check_engines(facts, of_plain)
        reference = _texts(plain, requests, max(settings.concurrency), "plain decoding", progress)
        texts = [
            Text(tuple(tokens), tuple(theirs), tuple(ours), limit)
            for writing in writings
            for tokens, limit, theirs, ours in zip(
                encoded, limits, reference, writing.texts, strict=True
            )
        ]
        judge = Judge(plain, max(settings.concurrency))
        with progress.stage("comparing", len(texts), "texts") as on_settled:
            found = compare_all(texts, {*facts["stop_tokens"]}, judge.answer, on_settled)
        words = _words(plain, found)
    tie = settings.tie
    if tie is None:
        tie = 0.0 if facts["dtype"] == EXACT else TIE
    levels = []
    for number, writing in enumerate(writings):
        mine = found[number * len(prompts) : (number + 1) * len(prompts)]
        described = describe(mine, tie, words.__getitem__)
        levels.append(Level(writing.concurrency, writing.drafting, described))
    about = {"prompts": len(prompts), "tokens": settings.tokens, "dtype": facts["dtype"]}
    about |= {"drafter": facts["drafter"], "versions": facts["versions"]}
    return Verification(about, tie, tuple(levels))


@dataclass(frozen=True)
class Judge:
    """Asks plain decoding what the comparison wants to know."""

    plain: EngineAnswers
    concurrency: int

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """One answer per question; all of them at once."""
        requests: list[Request] = []
        for one in questions:
            if one.token is not None:
                requests.append(Request(one.prefix, 1, one.token))
            if one.max_tokens:
                requests.append(Request(one.continued, one.max_tokens))
        done = iter(complete(self.plain, requests, self.concurrency))
        answers = []
        for one in questions:
            regret = 0.0  # where nothing was to be scored
            if one.token is not None:
                told = next(done).regret
                regret = math.nan if told is None else told  # no answer exonerates nobody
            continuation = tuple(next(done).tokens) if one.max_tokens else ()
            answers.append(Answer(regret, continuation))
        return answers


def check_concurrency(settings: GateSettings, facts: Facts) -> None:
    """Raises ValueError where requests would wait for each other inside the engine."""
    most, taken = max(settings.concurrency), facts["max_num_seqs"]
    if most > taken:
        raise ValueError(
            f"concurrency {most} is more than the {taken} requests the engine takes"
            " at a time: raise its --max-num-seqs, or lower --concurrency."
        )


def check_engines(dflash: Facts, plain: Facts) -> None:
    """Raises ValueError where plain decoding is not the plain decoding of the same model."""
    ours, theirs = dflash["dtype"], plain["dtype"]
    if ours != theirs:
        raise ValueError(f"DFlash's engine runs in {ours}, plain decoding's in {theirs}.")
    longest, longest_plain = dflash["max_model_len"], plain["max_model_len"]
    if longest != longest_plain:
        raise ValueError(
            f"DFlash's engine takes {longest} tokens, plain decoding's"
            f" {longest_plain}: set --max-model-len for both."
        )
    drafter = plain["drafter"]
    if drafter is not None:
        raise ValueError(
            f"plain decoding's engine drafts as well ({drafter}): leave speculative decoding"
            " out of the flags for both engines."
        )


def text_limits(prompts: Sequence[Sequence[int]], tokens: int, max_model_len: int) -> list[int]:
    """How long each text may become.

    Raises:
        ValueError: a prompt is empty or leaves no room.
    """
    limits = []
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} is empty.")
        if len(prompt) >= max_model_len:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, which leaves no room for text in"
                f" {max_model_len}: leave it out, or raise the engine's --max-model-len."
            )
        limits.append(min(tokens, max_model_len - len(prompt)))
    return limits


def _words(engine: EngineAnswers, found: Sequence[Sequence[Divergence]]) -> dict[int, str]:
    """The text of every token that occurs in divergences."""
    both = [token for text in found for one in text for token in (one.dflash, one.plain)]
    tokens = sorted({token for token in both if token is not None})
    return dict(zip(tokens, engine.decode(tokens=tokens), strict=True))


def _write(
    dflash: EngineAnswers, requests: Sequence[Request], concurrency: int, progress: Progress
) -> Writing:
    before = dflash.counts()
    name = f"DFlash, concurrency {concurrency}"
    texts = _texts(dflash, requests, concurrency, name, progress)
    return Writing(concurrency, Drafting.between(before, dflash.counts()), texts)


def _texts(
    engine: EngineAnswers,
    requests: Sequence[Request],
    concurrency: int,
    name: str,
    progress: Progress,
) -> list[list[int]]:
    with progress.stage(name, len(requests), "texts") as on_finished:
        return [one.tokens for one in complete(engine, requests, concurrency, on_finished)]
