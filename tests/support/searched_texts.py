"""Texts for the kernels that look up free drafts, beside a search written out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from support.kernel_oracle import Oracle
from support.recorded_drafts import longest_match
from vllm_dflash.engine.v2.draft_slots import Batch
from vllm_dflash.engine.v2.text_look_up import TextLookUp
from vllm_dflash.engine.warm import tensors_of
from vllm_dflash.planning.texts import LONGEST

CPU = torch.device("cpu")
UNTOUCHED = 7


@dataclass
class Case:
    """Texts of requests, of random tokens; some end with a passage that occurs before."""

    num_requests: int
    longest: int
    vocab_size: int
    width: int = 15


def predicted(text: list[int], width: int) -> tuple[list[int], int]:
    """Return the predicted tokens, and how long the match is."""
    best, start = longest_match(np.array(text), len(text))
    if not best:
        return [text[-1]] * width, 0
    repeated = text[start:]
    return [repeated[number % len(repeated)] for number in range(width)], best


def look_up(
    requests: list[list[int]], width: int, in_prompt: int = -1, device: torch.device | str = CPU
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is found and what is expected, [R + 1, K + 1]: tokens, and the match.

    Texts are in slots in the opposite order, with others between them; no token follows them. The
    last row is behind the batch, where graphs have none of its requests.
    """
    num_requests, num_slots = len(requests), 2 * len(requests) + 1
    longest = max(map(len, requests))
    texts = np.full((num_slots, longest + 1), -9, np.int32)
    total_len = np.zeros(num_slots, np.int32)
    slots = [2 * (num_requests - number) - 1 for number in range(num_requests)]
    for slot, text in zip(slots, requests, strict=True):
        texts[slot, : len(text)], total_len[slot] = text, len(text)
    sampled = np.ones(num_requests, np.int32)
    expected = [predicted(text, width) for text in requests]
    if 0 <= in_prompt < num_requests:
        sampled[in_prompt], expected[in_prompt] = 0, ([0] * width, 0)
    found = TextLookUp(num_requests + 1, longest + 1, width, torch.device(device))
    for each in tensors_of(found):
        each.fill_(UNTOUCHED)  # of an earlier step
    found._best.fill_((LONGEST << 32) | 1)
    arrays = np.array([*slots, -1]), np.append(sampled, np.int32(0)), texts, total_len, total_len
    found.look_up(Batch._make(torch.from_numpy(each).to(device) for each in arrays))
    columns = found.tokens, found.matches[:, None]
    expected.append(([UNTOUCHED] * width, UNTOUCHED))
    rows = [[*tokens, match] for tokens, match in expected]
    return torch.cat(columns, dim=1).cpu(), torch.tensor(rows)


def texts_of(case: Case) -> list[list[int]]:
    """Return texts; the first one is as long as possible, the second one a single token."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, case.longest + 1, case.num_requests)
    lengths[:2] = [case.longest, 1][: len(lengths)]
    texts = [random.integers(0, case.vocab_size, length) for length in lengths]
    for text in texts[::3]:
        size = int(random.integers(0, min(3 * LONGEST, len(text)) + 1))
        start = int(random.integers(0, len(text) - size + 1))
        text[len(text) - size :] = text[start : start + size].copy()
    return [text.tolist() for text in texts]


def compare(
    case: Case, *, device: torch.device | str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare a batch in which one request is in its prompt."""
    return look_up(texts_of(case), case.width, case.num_requests // 2 or -1, device)


TEXT_LOOK_UP = Oracle(
    "text look-up",
    {
        "4 texts of 5,000": Case(4, 5_000, 40),
        "64 texts of 40,000": Case(64, 40_000, 150_000),
        "64 texts of 40,000 that repeat": Case(64, 40_000, 12),
        "512 texts of 10,000": Case(512, 10_000, 300, width=7),  # more parts than programs
        "one token over and over": Case(1, 40_000, 1),
    },
    compare,
    dtypes=(torch.int32,),
    interpreted=("4 texts of 5,000",),
)
