"""Compares texts token by token: where DFlash's differs from plain decoding's, and by how much.

Pure: `compare` is a generator that yields requests to plain decoding, to learn what it would have
written or how likely it finds a token, and is sent the results. `compare_all` batches the requests
of many texts in rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain

from vllm_dflash.tools.completions import Finished, Request

Tokens = tuple[int, ...]
FIRST_PIECE = 16
"""Tokens to request after a divergence, doubled each time they agree. Requesting all at once would
waste work on texts that diverge repeatedly."""


@dataclass(frozen=True)
class Text:
    """What both wrote after a prompt."""

    prompt: Tokens
    plain: Tokens
    dflash: Tokens
    limit: int
    """Maximum tokens, unless a stop token ends the text first."""


@dataclass(frozen=True)
class Divergence:
    """A place where plain decoding would have written another token after the same tokens."""

    position: int
    """Number of the text's tokens before it."""
    dflash: int | None
    plain: int | None
    """The tokens; None if the text has ended."""
    regret: float
    """Regret of DFlash's token, in nat: plain decoding's log-probability of its best token minus
    that of this one; infinite if one text has ended."""

    def is_tie(self, tie: float) -> bool:
        """Whether rounding explains it: DFlash's token is almost as likely as the best one.

        NaN is not a tie.
        """
        return self.regret <= tie


def compare(
    text: Text, stop_tokens: AbstractSet[int]
) -> Generator[list[Request], list[Finished], list[Divergence]]:
    """Find every divergence. After each, plain decoding continues from DFlash's own tokens."""
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
            # Equal so far, and plain decoding has not ended: request more.
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
        scored, *rest = yield requests
        # An unknown regret must not pass as a tie.
        regret = math.nan if scored.regret is None else scored.regret
        found.append(Divergence(at, got, wanted, regret))
        if ends:
            if next_one < len(ours):
                found.append(Divergence(next_one, ours[next_one], None, math.inf))
            return found
        start, plain = next_one, tuple(rest[0].tokens)


def compare_all(
    texts: Sequence[Text],
    stop_tokens: AbstractSet[int],
    ask: Callable[[list[Request]], Sequence[Finished]],
    on_round: Callable[[int], None] = lambda settled: None,
) -> list[list[Divergence]]:
    """Find the divergences of each text, with one batch of distinct requests per round.

    `ask` runs requests on plain decoding and returns their results in order, such as `complete`.
    `on_round` is called before each round with the number of texts that are done.
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
