"""V1's start-up profile, with a fake clock."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.fake_time import FakeTime
from vllm_dflash.engine.block_layout import BlockInputs
from vllm_dflash.engine.v1.v1_profile import profile_v1

ROWS = [1, 2, 3, 4, 8, 12]
"""For 4 requests and 2 drafts: batches of one row each, then full batches of several."""
MORE_ROWS = [16, 24, 32, 48, 64]
"""For as many requests with free drafts, up to the maximum tokens of a step."""


class MadeUp:
    """A V1 runner and its proposer of 4 requests and 2 drafts, whose work takes set times.

    Each token of context takes a microsecond in a plain step, two more for each draft after it,
    and ten in a block.
    """

    max_batch_size, max_num_tokens, width, feature_width = 4, 64, 2, 6
    num_speculative_tokens = 32  # includes free drafts, which are not the drafter's
    dtype, block_size, spec = torch.float32, 16, SimpleNamespace(mask_token_id=9, first_draft_row=1)
    runs_target_alone = reads_newest = False

    def __init__(self, fake: FakeTime, max_model_len: int) -> None:
        self.time, self.max_model_len = fake, max_model_len
        self.ran: list[str] = []
        self.drafter = self.block = self
        self.model = SimpleNamespace(
            compute_logits=lambda hidden: self.takes("head", len(hidden)),
            context=SimpleNamespace(store=self.store),
        )

    def takes(self, part: str, milliseconds: float) -> None:
        self.ran.append(part)
        self.time.now += milliseconds / 1000

    def _dummy_run(
        self, count: int, *, force_attention: bool, profile_seq_lens: int, uniform_decode: bool
    ) -> Any:
        assert (self.runs_target_alone, force_attention) == (True, True)
        assert profile_seq_lens <= self.max_model_len
        reads = 1 + 2 * (count - 1) if uniform_decode else 1
        self.takes("target", 2 + count + reads * profile_seq_lens / 1000)
        return torch.zeros(count, 2), None

    def draft(self, inputs: BlockInputs, table: torch.Tensor, newest: torch.Tensor | None) -> None:
        assert not self.runs_target_alone
        if self.reads_newest:
            assert newest is not None
            assert newest.shape == (len(inputs.requests), 6)
        else:
            assert newest is None
        assert (inputs.slots == -1).all()
        assert table.shape == (len(inputs.requests), -(-self.max_model_len // self.block_size))
        assert inputs.positions.max() < self.max_model_len
        self.takes("block", 3 * len(inputs.input_ids) + inputs.positions[0] / 100)

    def store(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        assert features.shape == (len(slots), 6)
        assert positions.tolist() == list(range(len(slots)))
        assert set(slots.tolist()) == {-1}
        self.takes("store", 0.5 * len(slots))


def test_v1_what_each_part_costs(fake: FakeTime) -> None:
    """The target runs without the drafter; blocks and storing come after a step of the target."""
    runner: Any = MadeUp(fake, max_model_len=103)  # a block in it has 100 tokens of context
    costs = profile_v1(runner)
    for curve, counts, expected in (
        (costs.verify, [*ROWS, *MORE_ROWS], [2.1 + 2 * count for count in [*ROWS, *MORE_ROWS]]),
        (costs.draft, [2, 3, 6, 12], [3 * count + 1 for count in (2, 3, 6, 12)]),
        (costs.context, [1, 2, 4, 8], [0.5, 1, 2, 4]),
    ):
        assert curve.counts.tolist() == counts
        assert curve.seconds * 1000 == pytest.approx(expected)
    behind = ["target", "head"]
    drafted, stored = (
        4 * [*["block"], *3 * [*behind, "block"]],
        4 * ["store", *3 * [*behind, "store"]],
    )
    assert runner.ran == behind * 4 * (6 + 5) + drafted + stored
    assert costs.attention == (0.0, 0.0, 0.0)  # contexts cannot get much longer


def test_v1_what_long_contexts_cost(fake: FakeTime) -> None:
    runner: Any = MadeUp(fake, max_model_len=20_000)
    runner.reads_newest = True
    costs = profile_v1(runner)
    assert costs.first_draft_row == 1
    assert np.array(costs.attention) == pytest.approx([1e-6, 2e-6, 1e-5])


def test_v1_blocks_whose_bonus_row_predicts_too(
    fake: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows for two drafts."""
    monkeypatch.setattr(MadeUp, "spec", SimpleNamespace(mask_token_id=9, first_draft_row=0))
    costs = profile_v1(MadeUp(fake, max_model_len=102))
    assert costs.first_draft_row == 0
    assert costs.draft.counts.tolist() == [2, 4, 8]
    assert costs.draft.seconds * 1000 == pytest.approx([7, 13, 25])
