"""The gate: DFlash writes texts at every concurrency; plain decoding writes and judges them.

The servers run one after the other, since each takes most of a GPU's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle, islice, pairwise

from vllm_dflash.tools.completions import complete, counts, decode, encode, make_requests
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.server import Server
from vllm_dflash.tools.server_process import Facts
from vllm_dflash.tools.verify.divergence import Text, Tokens, compare_all
from vllm_dflash.tools.verify.verification import Finding, Level, Verification

Start = Callable[[], AbstractContextManager[Server]]
"""Starts a server, which ends with the context."""
TIE = 0.20
"""Nat. In bfloat16, logits between 16 and 32 are 0.125 apart, so rounding can differ by that."""
EXACT = "float32"
"""In this dtype greedy texts are identical: only equal logits are a tie."""


@dataclass(frozen=True)
class GateSettings:
    """How to verify."""

    concurrency: tuple[int, ...] = (1, 8, 32)
    tokens: int = 128
    """Maximum new tokens per text."""
    tie: float | None = None
    """Largest regret of a tie, in nat; None: 0.20, or 0 in float32."""


def verify(
    prompts: Sequence[str],
    start_dflash: Start,
    start_plain: Start,
    settings: GateSettings | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Compare greedy texts of DFlash and plain decoding after these prompts, token by token.

    `start_plain` starts the same server as `start_dflash`, which has ended then, without a
    speculative config.

    Raises:
        ValueError: a prompt or concurrency does not fit the engines, an engine refused its
            arguments, or the engines cannot be compared.
        EngineDied: an engine died.
    """
    settings, progress = settings or GateSettings(), progress or Progress()
    most = max(settings.concurrency)

    def write(server: Server, concurrency: int, name: str, least: int = 0) -> list[Tokens]:
        # Prompts repeat until as many requests are in flight as the level says.
        repeated = [*islice(cycle(requests), max(len(requests), least))]
        with progress.stage(name, len(repeated), "texts") as on_finished:
            finished = complete(server, repeated, concurrency, on_finished)
        return [tuple(one.tokens) for one in finished]

    with start_dflash() as dflash:
        with progress.stage("starting DFlash's engine"):
            facts = dflash.wait()
        requests = make_requests(encode(dflash, prompts), settings.tokens, most, facts)
        written, drafted = [], [counts(dflash)]
        for concurrency in settings.concurrency:
            name = f"DFlash, concurrency {concurrency}"
            written.append(write(dflash, concurrency, name, least=concurrency))
            drafted.append(counts(dflash))
    with start_plain() as plain:
        with progress.stage("starting plain decoding's engine"):
            check_engines(facts, plain.wait())
        reference = write(plain, most, "plain decoding")
        texts = [
            Text(tuple(request.tokens), theirs, ours, request.max_tokens)
            for level in written
            for request, theirs, ours in zip(cycle(requests), cycle(reference), level, strict=False)
        ]
        ask = partial(complete, plain, concurrency=most)
        with progress.stage("comparing", len(texts), "texts") as on_settled:
            compared = compare_all(texts, {*facts["stop_tokens"]}, ask, on_settled)
        word = cache(lambda token: None if token is None else decode(plain, [token]))
        tie = settings.tie
        if tie is None:
            tie = 0.0 if facts["dtype"] == EXACT else TIE
        numbers = [number % len(prompts) for level in written for number in range(len(level))]
        found = [
            [
                Finding(
                    prompt=number,
                    position=one.position,
                    dflash=word(one.dflash),
                    plain=word(one.plain),
                    regret=one.regret,
                    is_tie=one.is_tie(tie),
                )
                for one in divergences
            ]
            for number, divergences in zip(numbers, compared, strict=True)
        ]
    rest = iter(found)
    levels = [
        Level.of(concurrency, *drafting_between(*between), [*islice(rest, len(texts))])
        for concurrency, between, texts in zip(
            settings.concurrency, pairwise(drafted), written, strict=True
        )
    ]
    about = {"prompts": len(prompts), "tokens": settings.tokens, "dtype": facts["dtype"]}
    about |= {"drafter": facts["drafter"], "versions": facts["versions"]}
    return Verification(about, tie, tuple(levels))


def check_engines(dflash: Facts, plain: Facts) -> None:
    """Raise ValueError if `plain` is not plain decoding with the same settings."""
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


def drafting_between(
    before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[int, float | None]:
    """Return verified drafts and acceptance length between two results of `counts`.

    The acceptance length is None if no drafts were verified.
    """
    steps, verified, accepted = (
        after.get(name, 0.0) - before.get(name, 0.0)
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    return int(verified), 1 + accepted / steps if steps else None
