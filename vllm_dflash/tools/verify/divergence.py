"""Token by token: where DFlash's text leaves plain decoding's, and by how much.

Pure. What plain decoding would have written or how it likes a token is asked for: `compare` yields
requests and is sent what became of them; `compare_all` collects those of many texts into rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain

from vllm_dflash.tools.engine_answers import Finished, Request

Tokens = tuple[int, ...]
FIRST_PIECE = 16
"""Tokens asked for behind a divergence; twice as many each time they agree. All at once would be
wasted on a text that diverges again and again."""


@dataclass(frozen=True)
class Text:
    """What both wrote behind a prompt."""

    prompt: Tokens
    plain: Tokens
    dflash: Tokens
    limit: int
    """Tokens at which a text ends that no stop token ended before."""


@dataclass(frozen=True)
class Divergence:
    """Where DFlash's text is not what plain decoding would have written behind the same tokens."""

    position: int
    """Tokens of the text before it."""
    dflash: int | None
    plain: int | None
    """The tokens; None: this text has ended."""
    regret: float
    """Regret of DFlash's token, in nat: plain decoding's log-probability of its best token minus
    that of this one; infinite where one of them has ended."""

    def is_tie(self, tie: float) -> bool:
        """Whether rounding explains it: plain decoding likes the token almost as much as its own.

        Regret that is not a number is no tie.
        """
        return self.regret <= tie


def compare(
    text: Text, stop_tokens: AbstractSet[int]
) -> Generator[list[Request], list[Finished], list[Divergence]]:
    """Find every divergence. Behind each, plain decoding goes on from DFlash's own tokens."""
    ours = text.dflash
    start, plain, asked = 0, text.plain, text.limit
    found: list[Divergence] = []
    while True:
        at = start + _length_in_common(ours[start:], plain)
        wanted = plain[at - start] if at - start < len(plain) else None
        got = ours[at] if at < len(ours) else None
        before = (*text.prompt, *ours[:at])
        stopped = bool(plain) and plain[-1] in stop_tokens
        if wanted is None and len(plain) == asked and not stopped and at < text.limit:
            # So far so good, and plain decoding has not ended.
            asked = min(2 * asked, text.limit - at)
            (written,) = yield [Request(before, asked)]
            start, plain = at, tuple(written.tokens)
            continue
        if wanted is None or got is None:
            if wanted != got:
                found.append(Divergence(at, got, wanted, math.inf))
            return found
        next_one = at + 1
        ends = got in stop_tokens or next_one == text.limit
        requests = [Request(before, 1, got)]
        if not ends:
            asked = min(FIRST_PIECE, text.limit - next_one)
            requests.append(Request((*before, got), asked))
        scored, *behind = yield requests
        # No answer exonerates nobody.
        regret = math.nan if scored.regret is None else scored.regret
        found.append(Divergence(at, got, wanted, regret))
        if ends:
            if next_one < len(ours):
                found.append(Divergence(next_one, ours[next_one], None, math.inf))
            return found
        start, plain = next_one, tuple(behind[0].tokens)


def compare_all(
    texts: Sequence[Text],
    stop_tokens: AbstractSet[int],
    ask: Callable[[list[Request]], Sequence[Finished]],
    on_round: Callable[[int], None] = lambda settled: None,
) -> list[list[Divergence]]:
    """The divergences of each text, asking about all at a time and nothing twice in a round.

    `ask` has plain decoding run these requests, in their order, such as `complete`; `on_round` is
    told before each round how many texts need no more answers.
    """
    found: list[list[Divergence]] = [[] for _ in texts]
    comparisons = {number: compare(text, stop_tokens) for number, text in enumerate(texts)}
    answers: dict[int, list[Finished] | None] = dict.fromkeys(comparisons)
    while comparisons:
        requests: dict[int, list[Request]] = {}
        for number, comparison in list(comparisons.items()):
            try:
                requests[number] = comparison.send(answers[number])  # type: ignore[arg-type]
            except StopIteration as end:
                found[number] = end.value
                del comparisons[number]
        on_round(len(texts) - len(comparisons))
        distinct = list(dict.fromkeys(chain.from_iterable(requests.values())))
        told = dict(zip(distinct, ask(distinct), strict=True)) if distinct else {}
        answers = {number: [told[one] for one in mine] for number, mine in requests.items()}
    return found


def _length_in_common(one: Tokens, other: Tokens) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
