"""The start-up profile, with a fake clock."""

from collections import namedtuple
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.eplb_utils import EPLBController, step_eplb_after

from support.fake_time import FakeTime
from vllm_dflash.engine import profile
from vllm_dflash.engine.profile import measure_curve, profiled_rows
from vllm_dflash.engine.v2.v2_profile import lengths_to_choose, profile_v2, ragged_seconds
from vllm_dflash.planning.costs import NO_ATTENTION


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

Graph = namedtuple("Graph", "uniform_token_count")


def graphs_for(captured: list[int | None] | None) -> Any:
    """Graphs for requests of so many rows each, None for any numbers; no manager if None."""
    if captured is None:
        return None
    graphs = {Graph(count): None for count in captured}
    return SimpleNamespace(graphs=graphs, captured_token_counts=list)


class Runner(SimpleNamespace):
    """V2's runner. A step takes 10 ms, 0.75 ms a row and 0.25 for its logits. A block of three rows
    for each request takes 2 ms. A row of padding takes no time."""

    max_num_reqs, max_num_tokens, max_model_len, vocab_size = 4, 64, 200, 1000
    num_speculative_steps = 2
    requests_of_graph: Mapping[int, int] = {}

    def __init__(self, clock: FakeTime, captured: Any = None, **changes: Any) -> None:
        super().__init__(clock=clock, cudagraph_manager=graphs_for(captured), **changes)
        self.speculator = SimpleNamespace(
            num_query_per_req=3, num_speculative_steps=2, runs_target_alone=False
        )
        self.model = SimpleNamespace(compute_logits=self.compute_logits)
        # As TRITON_ATTN does for graphs.
        self.model_state = SimpleNamespace(prepare_attn=lambda batch: batch.seq_lens.fill_(1))

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
        # The step is piecewise unless all its requests have a number of rows that has a graph.
        each, left = divmod(count, min(count, self.max_num_reqs))
        manager = self.cudagraph_manager
        if manager is not None and (left or Graph(each) not in manager.graphs):
            self.clock.now += 0.005
        return torch.zeros(padded, 1), None


@pytest.fixture(autouse=True)
def _nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)


def test_v2_the_drafter_is_what_a_step_takes_longer_with_it(fake: FakeTime) -> None:
    """A block has three rows for each request. Context is stored in the same graph."""
    costs = profile_v2(Runner(fake))
    assert costs.verify.counts.tolist() == ROWS
    assert costs.verify.seconds * 1000 == pytest.approx([10 + count for count in ROWS])
    assert costs.draft.counts.tolist() == [3, 6, 9, 12]
    assert costs.first_draft_row == 1
    assert costs.draft.seconds * 1000 == pytest.approx([2, 4, 6, 8])
    assert not np.any(costs.context.at(np.array([1, 1000])))
    assert costs.attention == NO_ATTENTION  # no request gets long enough to show it


def test_v2_lengths_without_a_graph_are_not_profiled(fake: FakeTime) -> None:
    """They take longer than their rows do, and the curve never falls."""
    costs = profile_v2(Runner(fake, [1, 3]))
    assert costs.verify.counts.tolist() == [1, 2, 3, 4, 12]
    assert costs.verify.seconds * 1000 == pytest.approx([11, 12, 13, 14, 22])


def test_v2_trees_are_profiled_though_they_are_larger_than_blocks(fake: FakeTime) -> None:
    runner = Runner(fake, [1, 3, 8], num_speculative_steps=7)
    assert profile_v2(runner).verify.counts.tolist() == [1, 2, 3, 4, 12, 32]


def test_v2_nothing_is_counted_for_the_balance_of_experts(fake: FakeTime) -> None:
    """vLLM's wrapper of dummy runs looks for a keyword. In 0.33 it turns all counting off."""

    class Balanced(Runner):
        _dummy_run = step_eplb_after(is_dummy=True)(Runner._dummy_run)

    def never(**_: Any) -> None:
        raise AssertionError("counted")

    suppressed: list[None] = []
    runner = Balanced(fake)
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
    costs = profile_v2(Runner(fake, max_model_len=8000, requests_of_graph=requests_of_graph))
    assert [1e6 * each for each in costs.attention] == pytest.approx([1.0, draft, 3.0])


def test_v2_blocks_whose_bonus_row_predicts_too(fake: FakeTime) -> None:
    """Three rows for three drafts, and a row more to verify them."""
    runner = Runner(fake, num_speculative_steps=3)
    runner.speculator.num_speculative_steps = 3
    assert profile_v2(runner).first_draft_row == 0


def test_v2_an_engine_of_one_request(fake: FakeTime) -> None:
    """One point makes no curve, and blocks are not measured later: two rows draft as one does."""
    costs = profile_v2(Runner(fake, max_num_reqs=1))
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
    runner = Runner(fake, captured, max_num_reqs=requests)
    assert 1000 * ragged_seconds(runner) == pytest.approx(milliseconds)
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
    runner: Any = SimpleNamespace(cudagraph_manager=graphs_for(captured))
    assert lengths_to_choose(runner, 7) == lengths
