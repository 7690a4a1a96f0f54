"""Steps whose tokens are drawn and whose drafts are verified, beside plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from support.kernel_oracle import Oracle
from vllm_dflash.engine.v2.drawing import DrawingSampler, DrawingVerifier, draw_batch
from vllm_dflash.engine.v2.drawing_kernels import Verified

TEMPERATURES = (0.0, 1.0, 0.7)
DECODING, PLACEHOLDERS, CHUNK = range(3)
"""What a request does: it decodes; it still is in its prompt, and its drafts are placeholders; or
its step ends within its prompt."""


@dataclass
class Case:
    """Requests with up to W drafts each."""

    num_requests: int
    width: int
    vocab_size: int
    use_fp64: bool = False


class Step:
    """A step of R requests. Each is in a slot of its own, in no order."""

    def __init__(
        self,
        case: Case,
        seed: int,
        dtype: torch.dtype = torch.float32,
        where: torch.device | str = "cpu",
    ) -> None:
        random = self.random = np.random.default_rng(seed)
        self.width, self.where = case.width, where
        count, num_slots = case.num_requests, case.num_requests + 3
        self.slots = random.permutation(num_slots)[:count]
        self.temperatures = random.choice(TEMPERATURES, num_slots).astype(np.float32)
        self.seeds = random.integers(-(2**63), 2**63, num_slots)
        self.prefill_lens = np.full(num_slots, 10_000, np.int32)
        self.kinds = random.choice((DECODING, DECODING, PLACEHOLDERS, CHUNK), count)
        self.num_rows = random.integers(1, 2 + case.width, count)
        self.num_rows[self.kinds == CHUNK] = 1
        """Rows with logits: one, and one for each draft."""
        before = np.where(self.kinds == DECODING, 0, random.integers(0, 5, count))
        """Rows of the prompt, without logits."""
        contexts = random.integers(6, 5_000, count)
        """Tokens before those rows."""
        self.seq_lens = (contexts + before + self.num_rows).astype(np.int32)
        last = contexts + before  # where the rows with logits begin
        shorter = {
            DECODING: last - random.integers(0, 5, count),
            PLACEHOLDERS: last + 1 + random.integers(0, case.width + 1, count) % self.num_rows,
            CHUNK: self.seq_lens + random.integers(1, 50, count),
        }
        for kind, lens in shorter.items():
            mine = self.kinds == kind
            self.prefill_lens[self.slots[mine]] = lens[mine]
        self.ends = np.cumsum([0, *self.num_rows]).astype(np.int32)
        starts = np.cumsum([0, *(before + self.num_rows)])
        self.rows = np.concatenate(
            [
                np.arange(end - rows, end)
                for end, rows in zip(starts[1:], self.num_rows, strict=True)
            ]
        )
        """The rows with logits, [Q], among all T rows of the step."""
        self.positions = np.concatenate(
            [
                np.arange(end - rows, end)
                for end, rows in zip(self.seq_lens, np.diff(starts), strict=True)
            ]
        )
        self.row_slots = self.slots.repeat(self.num_rows)
        shape = len(self.rows), case.vocab_size + 3
        logits = 2.0 * torch.randn(shape, generator=torch.Generator().manual_seed(seed % 2**31))
        logits[:, case.vocab_size :] = 99.0  # not of a token
        self.logits = logits.to(where, dtype)[:, : case.vocab_size]
        self.use_fp64 = case.use_fp64
        self.drawn = self.draw()
        self.tokens = self.draft(case.vocab_size)

    def there(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Return the arrays on the device."""
        return [torch.from_numpy(each).to(self.where) for each in arrays]

    def draw(self) -> list[int]:
        """Return the token that plain decoding draws at each row: vLLM's draw, or the most likely
        with the lowest id."""
        given = self.there(self.row_slots, self.temperatures, self.seeds, self.positions[self.rows])
        drawn: list[int] = gumbel_sample(
            self.logits,
            *given,
            apply_temperature=False,  # the logits have it
            is_drafting=False,
            use_fp64=self.use_fp64,
        ).tolist()
        for row, slot in enumerate(self.row_slots.tolist()):
            if self.temperatures[slot] == 0.0:
                values = self.logits[row].tolist()
                drawn[row] = values.index(max(values))
        return drawn

    def draft(self, vocab_size: int) -> np.ndarray:
        """Return the tokens of all rows: many drafts are what is drawn before them, others are not,
        or are no token."""
        tokens = self.random.integers(0, vocab_size, len(self.positions)).astype(np.int32)
        for row in range(1, len(self.rows)):
            chance = self.random.random()
            if chance < 0.7:
                tokens[self.rows[row]] = self.drawn[row - 1]
            elif chance < 0.8:
                tokens[self.rows[row]] = -1
        return tokens

    def verifier(self) -> DrawingVerifier:
        """Return a verifier with the state of these requests."""
        made: Any = object.__new__(DrawingVerifier)
        temperatures, seeds, prefill_lens = (
            SimpleNamespace(gpu=each)
            for each in self.there(self.temperatures, self.seeds, self.prefill_lens)
        )
        sampler = made.sampler = object.__new__(DrawingSampler)
        sampler.sampling_states = SimpleNamespace(temperature=temperatures, seeds=seeds)
        sampler.req_states = SimpleNamespace(prefill_len=prefill_lens)
        sampler.use_fp64_gumbel = self.use_fp64
        made.num_speculative_steps = self.width
        verifier: DrawingVerifier = made
        return verifier

    def batch(self) -> Any:
        """Return vLLM's batch of the step."""
        slots, row_slots, rows, tokens, positions, ends, seq_lens = self.there(
            *(self.slots, self.row_slots, self.rows, self.tokens, self.positions),
            *(self.ends, self.seq_lens),
        )
        starts = self.ends[:-1].repeat(np.diff(self.ends))
        local_rows = np.arange(len(self.rows), dtype=np.int32) - starts
        return SimpleNamespace(
            idx_mapping_np=self.slots,
            idx_mapping=slots,
            expanded_idx_mapping=row_slots,
            logits_indices=rows,
            input_ids=tokens,
            positions=positions,
            expanded_local_pos=self.there(local_rows)[0],
            cu_num_logits=ends,
            seq_lens=seq_lens,
        )

    def verify(self, *, in_parts: bool = False) -> Verified:
        """Let the device verify; `in_parts`: as in a step with log-probabilities, in which it is
        left to vLLM who gets no token."""
        verifier, found = self.verifier(), list[Verified]()

        def verify(*given: torch.Tensor, seq_lens: torch.Tensor) -> Verified:
            found.append(verifier.verify(*given, **({} if in_parts else {"seq_lens": seq_lens})))
            return found[0]

        draw_batch(verifier.sampler, verify, self.logits, self.batch())
        return found[0]

    def by_hand(self, *, in_parts: bool = False) -> list[tuple[list[int], int]]:
        """Return each request's tokens, and how many of its drafts are rejected."""
        found: list[tuple[list[int], int]] = []
        for request, kind in enumerate(self.kinds.tolist()):
            first, count = int(self.ends[request]), int(self.num_rows[request])
            if kind == CHUNK and not in_parts:
                found.append(([], 0))
                continue
            written = [self.drawn[first]]
            for draft in range(1, count):
                is_token = kind == DECODING
                if not is_token or self.tokens[self.rows[first + draft]] != written[-1]:
                    break
                written.append(self.drawn[first + draft])
            found.append((written, count - len(written)))
        return found

    def check(self, *, in_parts: bool = False) -> tuple[list[int], list[int]]:
        """Raise AssertionError if the device decides otherwise. Return what it draws at each row,
        and what it should."""
        found = self.verify(in_parts=in_parts)
        assert found.sampled.shape == (len(self.slots), 1 + self.width)
        sampled, rejected = found.sampled.tolist(), found.num_rejected.tolist()
        by_hand = self.by_hand(in_parts=in_parts)
        for tokens, count, refused, (written, expected) in zip(
            sampled, found.num_sampled.tolist(), rejected, by_hand, strict=True
        ):
            assert (tokens[:count], refused) == (written, expected)
        return found.drawn.tolist(), self.drawn


def compare(
    case: Case, *, device: torch.device | str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens drawn at each row, found and expected; both are equal, as is all else."""
    step = Step(case, case.num_requests, dtype, device)
    for in_parts in (False, True):
        found, expected = step.check(in_parts=in_parts)
        assert found == expected
    return torch.tensor(found).double(), torch.tensor(expected).double()


DRAWING = Oracle(
    "drawing",
    {
        "V = 300, W = 7": Case(6, 7, 300),
        "V = 20,000, W = 3": Case(3, 3, 20_000),
        "V = 151,936, W = 15": Case(64, 15, 151_936),
        "V = 151,936, W = 64": Case(3, 64, 151_936),
        "V = 32,000, W = 7, 512 requests": Case(512, 7, 32_000),
        "V = 128,256, W = 7, float64": Case(16, 7, 128_256, use_fp64=True),
    },
    compare,
    interpreted=("V = 300, W = 7", "V = 20,000, W = 3"),
)
