"""The start-up profile, with a fake clock."""

from collections import namedtuple
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.eplb_utils import EPLBController, step_eplb_after

from support.fake_time import FakeTime
from vllm_dflash.engine import profile
from vllm_dflash.engine.block_layout import BlockInputs
from vllm_dflash.engine.profile import measure_curve, profiled_rows
from vllm_dflash.engine.v1.v1_profile import profile_v1
from vllm_dflash.engine.v2.v2_profile import lengths_to_choose, profile_v2, ragged_seconds
from vllm_dflash.planning.costs import NO_ATTENTION


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()
    monkeypatch.setattr(profile, "time", time)
    monkeypatch.setattr(profile, "from_rank_0", lambda seconds: seconds)
    return time


def test_a_profile_stops_when_its_time_is_up(fake: FakeTime) -> None:
    runs: list[int] = []

    def run(count: int) -> None:
        runs.append(count)
        fake.now += 0.01 * count

    curve = measure_curve(run, (1, 2, 4, 8, 16), share=0.15)
    assert sorted(set(runs)) == [1, 2, 4]  # 3 * (0.01 + 0.02 + 0.04) > 0.15
    assert float(curve.at(3)) == pytest.approx(0.03)
    assert float(curve.at(16)) == pytest.approx(0.16)  # continues with the last slope


def test_profiled_batches_are_never_longer_than_their_requests_may_be() -> None:
    """A batch must have single rows or be evenly filled, or it would read beyond its cache."""
    for max_requests, most in ((64, 512), (100, 1600), (1, 8), (256, 300)):
        rows = profiled_rows(max_requests, most)
        assert all(count <= max_requests or count % max_requests == 0 for count in rows)
        assert rows == sorted(set(rows))
        assert rows[-1] <= most
        assert len(rows) >= 2


def test_the_best_of_three_counts_and_building_kernels_does_not(
    fake: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks get what rank 0 measured."""
    lasts = iter([9.0, 0.3, 0.1, 0.2, 9.0, 0.5, 0.6, 0.4])

    def run(_: int) -> None:
        fake.now += next(lasts)

    monkeypatch.setattr(profile, "from_rank_0", lambda seconds: 10 * seconds)
    curve = measure_curve(run, (1, 2), share=100.0)
    assert curve.counts.tolist() == [1, 2]
    assert curve.seconds == pytest.approx([1.0, 4.0])


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


Graph = namedtuple("Graph", "uniform_token_count")


class Runner(SimpleNamespace):
    """V2's runner. A step takes 10 ms, 0.75 ms a row and 0.25 for its logits. A block of three rows
    for each request takes 2 ms. A row of padding takes no time."""

    model: Any
    vocab_size = 1000

    def __init__(self, clock: FakeTime, **sizes: Any) -> None:
        speculator = SimpleNamespace(
            num_query_per_req=3, num_speculative_steps=2, runs_target_alone=False
        )
        self.clock, self.cudagraph_manager = clock, None
        self.requests_of_graph: dict[int, int] = {}
        model = SimpleNamespace(compute_logits=self.compute_logits)
        # As TRITON_ATTN does for graphs.
        state = SimpleNamespace(prepare_attn=lambda batch: batch.seq_lens.fill_(1))
        super().__init__(
            speculator=speculator, num_speculative_steps=2, model=model, model_state=state, **sizes
        )

    def prepare_dummy_attn(self, batch: Any) -> None: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.clock.now += 0.00025 * len(hidden)
        return hidden

    def _dummy_run(
        self,
        count: int,
        context_len: int = 0,
        uniform_decode: bool = False,
        *,
        skip_eplb: bool,
        randomize_inputs: bool,
    ) -> tuple[torch.Tensor, None]:
        padded = count + 2  # graphs have more rows
        batch = SimpleNamespace(
            is_padding=torch.ones(padded, dtype=torch.bool), seq_lens=torch.tensor([context_len])
        )
        self.prepare_dummy_attn(batch)
        self.model_state.prepare_attn(batch)
        context_len = int(batch.seq_lens)
        assert randomize_inputs
        assert skip_eplb
        asked = 1 if uniform_decode and context_len else min(count, self.max_num_reqs)
        requests = self.speculator.num_dummy_requests = self.requests_of_graph.get(count, asked)
        has_block = not self.speculator.runs_target_alone
        self.clock.now += 0.010 + 0.00075 * int((~batch.is_padding).sum())
        self.clock.now += 0.002 * min(count, self.max_num_reqs) * has_block
        # A microsecond for each token of context, a tenth of that for each draft, three a block.
        drafts, each = max(count - requests, 0), 1.0 + 3.0 * has_block
        self.clock.now += context_len * (each * requests + 0.1 * drafts) / 1e6
        # The step is piecewise if its requests do not all have the same number of rows.
        if self.cudagraph_manager is not None and count % min(count, self.max_num_reqs):
            self.clock.now += 0.005
        return torch.zeros(padded, 1), None


@pytest.fixture(autouse=True)
def _nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)


def test_v2_the_drafter_is_what_a_step_takes_longer_with_it(fake: FakeTime) -> None:
    """A block has three rows for each request. Context is stored in the same graph."""
    runner: Any = Runner(fake, max_num_reqs=4, max_num_tokens=64, max_model_len=200)
    costs = profile_v2(runner)
    assert costs.verify.counts.tolist() == ROWS
    assert costs.verify.seconds * 1000 == pytest.approx([10 + count for count in ROWS])
    assert costs.draft.counts.tolist() == [3, 6, 9, 12]
    assert costs.first_draft_row == 1
    assert costs.draft.seconds * 1000 == pytest.approx([2, 4, 6, 8])
    assert not np.any(costs.context.at(np.array([1, 1000])))
    assert costs.attention == NO_ATTENTION  # no request gets long enough to show it


def test_v2_nothing_is_counted_for_the_balance_of_experts(fake: FakeTime) -> None:
    """vLLM's wrapper of dummy runs looks for a keyword. In 0.33 it turns all counting off."""

    class Balanced(Runner):
        _dummy_run = step_eplb_after(is_dummy=True)(Runner._dummy_run)

    def never(**_: Any) -> None:
        raise AssertionError("counted")

    suppressed: list[None] = []
    runner: Any = Balanced(fake, max_num_reqs=4, max_num_tokens=64, max_model_len=200)
    runner.eplb = SimpleNamespace(step=never, suppress=lambda: nullcontext(suppressed.append(None)))
    profile_v2(runner)
    assert bool(suppressed) == hasattr(EPLBController, "suppress")


@pytest.mark.parametrize(
    ("requests_of_graph", "draft"),
    [({3: 2}, 0.1), ({3: 3}, 0.0), ({3: 4}, 0.0), ({1: 4, 3: 4}, 0.0)],
)
def test_v2_what_contexts_take_where_graphs_are_for_any_lengths(
    fake: FakeTime, requests_of_graph: dict[int, int], draft: float
) -> None:
    """They run with a request for each of their rows, padding included, and a block for each."""
    runner: Any = Runner(fake, max_num_reqs=4, max_num_tokens=64, max_model_len=8000)
    runner.requests_of_graph = requests_of_graph
    costs = profile_v2(runner)
    assert [1e6 * each for each in costs.attention] == pytest.approx([1.0, draft, 3.0])


def test_v2_blocks_whose_bonus_row_predicts_too(fake: FakeTime) -> None:
    """Three rows for three drafts, and a row more to verify them."""
    runner: Any = Runner(fake, max_num_reqs=4, max_num_tokens=64, max_model_len=200)
    runner.num_speculative_steps = runner.speculator.num_speculative_steps = 3
    assert profile_v2(runner).first_draft_row == 0


def test_v2_an_engine_of_one_request(fake: FakeTime) -> None:
    """One point makes no curve, and blocks are not measured later: two rows draft as one does."""
    runner: Any = Runner(fake, max_num_reqs=1, max_num_tokens=64, max_model_len=200)
    costs = profile_v2(runner)
    assert costs.verify.seconds * 1000 == pytest.approx([11, 12, 13])
    assert costs.draft.counts.tolist() == [3, 6]
    assert costs.draft.seconds * 1000 == pytest.approx([2, 2])


@pytest.mark.parametrize(
    ("captured", "requests", "milliseconds"),
    [
        ([1, 3, None], 4, 5 - 1),  # one row less
        ([1, 3, None], 256, 5 - 1),  # enough requests for a row each
        ([1, 3], 1, 0),  # no batch of one request is ragged
        ([None], 4, 0),  # no step has a graph of its own
        (None, 4, 0),
    ],
)
def test_v2_what_ragged_batches_take_longer(
    fake: FakeTime, captured: list[int | None] | None, requests: int, milliseconds: float
) -> None:
    runner: Any = Runner(fake, max_num_reqs=requests, max_num_tokens=64, max_model_len=200)
    if captured is not None:
        graphs = {Graph(count): None for count in captured}
        runner.cudagraph_manager = SimpleNamespace(graphs=graphs)
    found = ragged_seconds(runner)
    assert 1000 * found == pytest.approx(milliseconds)
    assert runner.max_num_reqs == requests


@pytest.mark.parametrize(
    ("captured", "lengths"),
    [
        ([1, 3, 5, 8, None], [0, 2, 4, 7]),
        ([3], [0, 2, 7]),
        ([3, 16], [0, 2, 7, 15]),  # a tree has 15 nodes
        ([None], [*range(8)]),  # graphs for any lengths: vLLM's adaptive verification
        ([], [*range(8)]),
        (None, [*range(8)]),
    ],
)
def test_v2_the_scheduler_chooses_among_lengths_that_have_graphs(
    captured: list[int | None] | None, lengths: list[int]
) -> None:
    manager = None
    if captured is not None:
        manager = SimpleNamespace(graphs={Graph(count): None for count in captured})
    runner: Any = SimpleNamespace(cudagraph_manager=manager)
    assert lengths_to_choose(runner, 7) == lengths
