"""The synchronous scheduler: drafts that came with a step's output are scheduled next."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from support.pairs import Pair
from vllm_dflash.config.engine_options import (
    CPU_RAY_EXECUTOR,
    MOST_FREE_DRAFTS,
    SCHEDULER,
    EngineOptions,
)
from vllm_dflash.engine.scheduler_output import room_for_blocks
from vllm_dflash.engine.v1 import v1_scheduler
from vllm_dflash.engine.v1.v1_scheduler import V1Scheduler, sends_drafts_with_output

WHOLE: Any = SimpleNamespace(
    cache_config=SimpleNamespace(),
    num_speculative_tokens=32,
    speculative_config=SimpleNamespace(method="dflash", num_speculative_tokens=32),
)
"""vLLM's config, with room for 32 drafts; a block has 7."""


@pytest.fixture(autouse=True)
def _executor_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    called_for = MultiprocExecutor.take_draft_token_ids
    monkeypatch.setattr(MultiprocExecutor, "take_draft_token_ids", called_for)


@pytest.fixture
def bare_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take out of vLLM's scheduler all that is not read here."""

    def start(self: Any, *, vllm_config: Any) -> None:
        self.vllm_config, self.max_num_running_reqs, self.requests = vllm_config, 4, {}
        self.num_spec_tokens = vllm_config.speculative_config.num_speculative_tokens

    monkeypatch.setattr(EngineOptions, "from_config", lambda _: SimpleNamespace(draft_width=7))
    monkeypatch.setattr(Scheduler, "__init__", start)


@pytest.mark.usefixtures("bare_scheduler")
def test_a_step_is_scheduled_with_room_for_blocks_and_may_return_more_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Scheduler, "schedule", lambda self: SimpleNamespace(room=self.num_spec_tokens)
    )
    scheduler = V1Scheduler(vllm_config=WHOLE)
    for _ in range(2):
        step: Any = scheduler.schedule()
        assert (step.room, step.num_spec_tokens_to_schedule) == (7, 32)


@pytest.mark.usefixtures("bare_scheduler")
@pytest.mark.parametrize("drafts", ["drafts", None])
def test_drafts_are_taken_after_the_tokens_of_their_step(
    monkeypatch: pytest.MonkeyPatch, drafts: Any
) -> None:
    """vLLM checks them against the grammar's state, and whether the request is past its prompt."""
    seen: list[Any] = []
    monkeypatch.setattr(
        V1Scheduler.__mro__[1], "update_from_output", lambda *_: seen.append("tokens")
    )
    monkeypatch.setattr(V1Scheduler, "update_draft_token_ids", lambda _, new: seen.append(new))
    output: Any = SimpleNamespace()
    v1_scheduler.DRAFTS.attach(output, drafts)
    V1Scheduler(vllm_config=WHOLE).update_from_output(SimpleNamespace(), output)
    assert seen == (["tokens", "drafts"] if drafts else ["tokens"])


def test_vllm_reckons_the_room_of_a_block(pair: Pair) -> None:
    """It reads the config that it is given, in several places."""
    whole = pair.start()
    narrow = room_for_blocks(whole)
    assert narrow.speculative_config is not None
    assert narrow.speculative_config.max_num_new_slots_for_drafting == 7
    assert narrow.num_lookahead_tokens == 8
    assert whole.speculative_config.max_num_new_slots_for_drafting == MOST_FREE_DRAFTS
    assert whole.num_lookahead_tokens == 1 + MOST_FREE_DRAFTS


@pytest.mark.parametrize(
    ("changes", "come_along"),
    [
        ({}, True),
        ({"distributed_executor_backend": CPU_RAY_EXECUTOR}, True),
        ({"distributed_executor_backend": "uni"}, False),  # a call costs nothing there
        ({"use_v2_model_runner": True}, False),  # its output is made before its drafts
        ({"scheduler_cls": "another"}, False),  # it would not take them
    ],
)
def test_where_drafts_come_along(changes: dict[str, Any], come_along: bool) -> None:
    settings: Any = {"scheduler_cls": SCHEDULER, "distributed_executor_backend": "mp"}
    whole = SimpleNamespace(**{"use_v2_model_runner": False, **settings, **changes})
    whole.scheduler_config = whole.parallel_config = whole
    assert sends_drafts_with_output(whole) == come_along


@pytest.mark.usefixtures("bare_scheduler")
@pytest.mark.parametrize(("comes_along", "taken"), [(True, None), (False, "called for")])
def test_workers_are_called_for_drafts_that_do_not_come_along(
    monkeypatch: pytest.MonkeyPatch, comes_along: bool, taken: str | None
) -> None:
    monkeypatch.setattr(MultiprocExecutor, "take_draft_token_ids", lambda _: "called for")
    monkeypatch.setattr(v1_scheduler, "sends_drafts_with_output", lambda config: config[0])
    for _ in range(2):  # a second engine in the process changes nothing
        V1Scheduler(vllm_config=WHOLE)
    executor: Any = SimpleNamespace(vllm_config=[comes_along])
    assert MultiprocExecutor.take_draft_token_ids(executor) == taken
