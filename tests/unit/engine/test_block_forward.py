"""What becomes of the drafter's logits, with a model whose logits are given."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_dflash.engine.block_layout import block_inputs
from vllm_dflash.engine.v1.block_forward import BlockForward

NAN, INF = math.nan, math.inf
NO_BLOCKS = np.zeros(0, np.int64), np.zeros(0, np.int32), None
"""DFlash does not need to know which row belongs to which block."""


class Fake:
    """A drafter whose hidden states are its logits. Its vocabulary is the target's in reverse."""

    has_candidates = False

    def __init__(self) -> None:
        self.hidden = torch.zeros(0, 4)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, *_: Any) -> torch.Tensor:
        assert len(input_ids) == len(positions) == len(self.hidden)
        return self.hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return 103 - tokens


@pytest.fixture
def model() -> Fake:
    return Fake()


@pytest.fixture
def block(model: Fake, monkeypatch: pytest.MonkeyPatch) -> BlockForward:
    """A block forward without an engine's forward context around the model."""
    config: Any = SimpleNamespace()
    made = BlockForward(model, config)  # type: ignore[arg-type]

    def run(*inputs: Any) -> torch.Tensor:
        return model(*inputs[2:])

    monkeypatch.setattr(made, "run", run)
    return made


def logits(*shares: float) -> list[float]:
    """Logits with these probabilities. A constant is added to all, which changes nothing."""
    return [math.log(share) + 3.5 for share in shares]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_likely_token_and_its_probability(block: BlockForward, dtype: torch.dtype) -> None:
    rows = [logits(0.7, 0.1, 0.1, 0.1), logits(0.2, 0.25, 0.15, 0.4), logits(0.1, 0.6, 0.1, 0.2)]
    tokens, probability = block.pick(torch.tensor(rows, dtype=dtype), *NO_BLOCKS)
    assert tokens == [103, 100, 102]  # numbered like the target's
    assert probability == pytest.approx(
        [0.7, 0.4, 0.6], rel=0.03 if dtype == torch.bfloat16 else 1e-5
    )


@pytest.mark.parametrize(
    ("bad", "finite"),
    [
        ([0.0, NAN, 9.0, 0.0], False),
        ([NAN] * 4, False),
        ([0.0, INF, 0.0, 0.0], False),
        ([-INF] * 4, False),
        ([0.0, -INF, -INF, -INF], True),  # impossible tokens do no harm
    ],
)
def test_confidence_is_a_probability_whatever_the_logits(
    block: BlockForward, bad: list[float], finite: bool
) -> None:
    """Also after a row that is not finite, and never NaN: the planner does not check it."""
    rows = torch.tensor([bad, logits(0.1, 0.6, 0.1, 0.2), bad])
    tokens, probability = block.pick(rows, *NO_BLOCKS)
    assert probability == pytest.approx([float(finite), 0.6, float(finite)])
    assert tokens[1] == 102


def test_each_requests_drafts_and_confidence_in_order(block: BlockForward, model: Fake) -> None:
    """Three requests with three drafts, one and two; bonus rows predict nothing. Drafts behind one
    that is not finite are dropped."""
    table = np.arange(16).reshape(4, 4)
    lengths = np.array([3, 0, 1, 2])
    inputs = block_inputs(np.array([5, 9, 2, 4]), lengths, np.arange(4), 77, table, 4)
    bonus_row, good = logits(0.97, 0.01, 0.01, 0.01), logits(0.1, 0.7, 0.1, 0.1)
    first = [bonus_row, good, [0.0, NAN, 0.0, 0.0], good]
    second = [bonus_row, logits(0.2, 0.26, 0.28, 0.26)]
    third = [[0.0, NAN, 0.0, 0.0], good, logits(0.1, 0.2, 0.2, 0.5)]
    model.hidden = torch.tensor(first + second + third)
    drafts = block.draft(inputs, torch.from_numpy(table), None)
    assert drafts.requests.tolist() == [0, 2, 3]
    assert drafts.tokens == [[102], [101], [102, 100]]
    assert drafts.confidence == pytest.approx(
        np.array([[0.7, 0.0, 0.7], [0.28, 0.0, 0.0], [0.7, 0.5, 0.0]])
    )


def test_attention_is_told_of_each_block(
    block: BlockForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets rows of drafted requests only, each with its own blocks and length."""
    seen: dict[str, Any] = {}

    class Group:
        layer_names = ("layer",)

        def build_metadata(self, metadata: Any) -> str:
            seen.update(vars(metadata))
            return "built"

    block.groups = [Group()]  # type: ignore[list-item]

    def run(metadata: Any, slots: Any, *inputs: torch.Tensor) -> torch.Tensor:
        seen.update(given=metadata, slots=slots, ids=inputs[0], positions=inputs[1])
        return torch.tensor([logits(0.1, 0.7, 0.1, 0.1)] * 5)

    monkeypatch.setattr(block, "run", run)
    table = torch.arange(12).view(3, 4)
    inputs = block_inputs(
        np.array([5, 9, 2]), np.array([2, 0, 1]), np.array([1, 2, 3]), 77, table.numpy(), 4
    )
    block.draft(inputs, table, None)
    assert seen["given"] == {"layer": "built"}
    assert seen["ids"].tolist() == [1, 77, 77, 3, 77]
    assert seen["positions"].tolist() == [5, 6, 7, 2, 3]
    assert seen["slots"]["layer"].tolist() == [5, 6, 7, 34, 35]
    assert seen["slot_mapping"].tolist() == [5, 6, 7, 34, 35]
    assert seen["query_start_loc"].tolist() == seen["query_start_loc_cpu"].tolist() == [0, 3, 5]
    assert seen["seq_lens"].tolist() == [8, 4]
    assert seen["block_table_tensor"].tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    sizes = [seen[name] for name in ("num_reqs", "num_actual_tokens", "max_query_len")]
    assert (sizes, seen["max_seq_len"]) == ([2, 5, 3], 8)


class FollowingTokens:
    """Scores that make each token follow the number before it, whatever the logits."""

    def __init__(self) -> None:
        self.newest: list[list[float] | None] = []

    def __call__(
        self,
        candidates: torch.Tensor,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        bonus: torch.Tensor,
        newest: torch.Tensor | None,
    ) -> torch.Tensor:
        self.newest.append(None if newest is None else newest[:, 0].tolist())
        first = bonus[:, None, None].expand(-1, 1, 3)
        before = torch.cat([first, candidates[:, :-1]], dim=1)
        follows = candidates[:, :, None] == before[..., None] + 1
        return logits[:, :, None] + 50.0 * follows


@pytest.mark.parametrize("reads_newest", [False, True])
def test_walks_along_each_block_by_itself(
    block: BlockForward, model: Any, reads_newest: bool
) -> None:
    """Blocks of one, three and two rows. The likeliest candidate is never the right one."""
    model.has_candidates, model.score_candidates = True, FollowingTokens()
    model.context = SimpleNamespace(fuse=lambda features: features + 1)
    candidates = torch.tensor(
        [[9, 5, 7], [9, 8, 21], [22, 9, 8], [9, 23, 0], [9, 0, 31], [0, 9, 32]]
    )
    likelihood = torch.tensor([[3.0, 2.0, 1.0]]).repeat(6, 1)
    likelihood[5, 0] = NAN
    model.compute_candidates = lambda hidden: (candidates, likelihood)
    lengths, bonus = np.array([1, 3, 2]), np.array([4, 20, 30], dtype=np.int32)
    newest = torch.tensor([[10.0], [20.0], [30.0]]) if reads_newest else None
    tokens, probability = block.pick(torch.zeros(6, 4), lengths, bonus, newest)
    assert tokens[:5] == [5, 21, 22, 23, 31]
    # One call for each width, each block with its own context.
    assert model.score_candidates.newest == ([[11], [31], [21]] if reads_newest else [None] * 3)
    assert probability == pytest.approx([1.0] * 5 + [0.0])
