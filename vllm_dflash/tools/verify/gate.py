"""The gate: DFlash writes at every concurrency, plain decoding writes and then judges.

One engine after the other, since on a GPU each of them takes most of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from vllm_dflash.tools.engine_answers import EngineAnswers, Facts, Request, complete
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.verify.divergence import Divergence, Text, Tokens, compare_all
from vllm_dflash.tools.verify.verification import Finding, Level, Verification

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
    most = max(settings.concurrency)
    with open_dflash() as dflash:
        with progress.stage("starting DFlash's engine"):
            facts = dflash.facts()
        requests = make_requests(dflash.encode(texts=list(prompts)), settings, facts)
        written, counts = [], [dflash.counts()]
        for concurrency in settings.concurrency:
            name = f"DFlash, concurrency {concurrency}"
            written.append(_write(dflash, requests, concurrency, name, progress))
            counts.append(dflash.counts())
    with open_plain() as plain:
        with progress.stage("starting plain decoding's engine"):
            check_engines(facts, plain.facts())
        reference = _write(plain, requests, most, "plain decoding", progress)
        texts = [
            Text(tuple(request.tokens), theirs, ours, request.max_tokens)
            for of_level in written
            for request, theirs, ours in zip(requests, reference, of_level, strict=True)
        ]
        ask = partial(complete, plain, concurrency=most)
        with progress.stage("comparing", len(texts), "texts") as on_settled:
            divergences = compare_all(texts, {*facts["stop_tokens"]}, ask, on_settled)
        tie = settings.tie
        if tie is None:
            tie = 0.0 if facts["dtype"] == EXACT else TIE
        found = _describe(plain, divergences, len(prompts), tie)
    levels = []
    for number, concurrency in enumerate(settings.concurrency):
        drafting = drafting_between(counts[number], counts[number + 1])
        mine = found[number * len(prompts) : (number + 1) * len(prompts)]
        levels.append(Level.of(concurrency, *drafting, mine))
    about = {"prompts": len(prompts), "tokens": settings.tokens, "dtype": facts["dtype"]}
    about |= {"drafter": facts["drafter"], "versions": facts["versions"]}
    return Verification(about, tie, tuple(levels))


def check_engines(dflash: Facts, plain: Facts) -> None:
    """Raises ValueError where plain decoding is not the plain decoding of the same model."""
    for option in ("dtype", "max_model_len"):
        if (ours := dflash[option]) != (theirs := plain[option]):
            raise ValueError(
                f"{option} is {ours} in DFlash's engine and {theirs} in plain decoding's: set"
                f" --{option.replace('_', '-')} for both."
            )
    if plain["drafter"] is not None:
        raise ValueError(
            f"plain decoding's engine drafts as well ({plain['drafter']}): leave speculative"
            " decoding out of the flags for both engines."
        )


def make_requests(
    prompts: Sequence[Sequence[int]], settings: GateSettings, facts: Facts
) -> list[Request]:
    """To continue each prompt for so long, or to the engine's limit.

    Raises:
        ValueError: requests would wait for each other inside the engine, or a prompt is empty or
            leaves no room.
    """
    if (most := max(settings.concurrency)) > (taken := facts["max_num_seqs"]):
        raise ValueError(
            f"concurrency {most} is more than the {taken} requests the engine takes"
            " at a time: raise its --max-num-seqs, or lower --concurrency."
        )
    requests, max_model_len = [], facts["max_model_len"]
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} is empty.")
        if len(prompt) >= max_model_len:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, which leaves no room for text in"
                f" {max_model_len}: leave it out, or raise the engine's --max-model-len."
            )
        requests.append(Request(prompt, min(settings.tokens, max_model_len - len(prompt))))
    return requests


def drafting_between(
    before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[int, float | None]:
    """Drafts verified and acceptance length between two looks at `EngineAnswers.counts`."""
    steps, verified, accepted = (
        after.get(name, 0.0) - before.get(name, 0.0)
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    return int(verified), 1 + accepted / steps if steps else None


def _write(
    engine: EngineAnswers,
    requests: Sequence[Request],
    concurrency: int,
    name: str,
    progress: Progress,
) -> list[Tokens]:
    with progress.stage(name, len(requests), "texts") as on_finished:
        finished = complete(engine, requests, concurrency, on_finished)
    return [tuple(one.tokens) for one in finished]


def _describe(
    engine: EngineAnswers, divergences: Sequence[Sequence[Divergence]], num_prompts: int, tie: float
) -> list[tuple[Finding, ...]]:
    """Findings for each text, in words; texts of all prompts follow each other, level by level."""
    both = {token for text in divergences for one in text for token in (one.dflash, one.plain)}
    tokens = sorted(token for token in both if token is not None)
    words: dict[int | None, str | None] = {None: None}
    words |= dict(zip(tokens, engine.decode(tokens=tokens), strict=True))
    return [
        tuple(
            Finding(
                prompt=number % num_prompts,
                position=one.position,
                dflash=words[one.dflash],
                plain=words[one.plain],
                regret=one.regret,
                is_tie=one.is_tie(tie),
            )
            for one in text
        )
        for number, text in enumerate(divergences)
    ]
