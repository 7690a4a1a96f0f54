"""The synchronous scheduler: drafts that came with a step's output are scheduled next."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import DraftTokenIds

from support.pairs import make_pair
from vllm_dflash.config.mode import CPU_RAY_EXECUTOR, MOST_FREE_DRAFTS, SCHEDULER, Mode
from vllm_dflash.engine import choose_scheduler as ours
from vllm_dflash.engine.choose_scheduler import build_scheduler
from vllm_dflash.engine.reporting.figures import FREE_DRAFTS
from vllm_dflash.engine.scheduler_output import room_for_blocks
from vllm_dflash.engine.v1 import v1_scheduler
from vllm_dflash.engine.v1.v1_scheduler import (
    DRAFTS,
    DFlashScheduler,
    drafts_come_with_the_output,
)
from vllm_dflash.seams import Seam, UnsupportedVllmError

WHOLE: Any = SimpleNamespace(
    cache_config=SimpleNamespace(),
    num_speculative_tokens=32,
    speculative_config=SimpleNamespace(method="dflash", num_speculative_tokens=32),
)
"""vLLM's config, with room for 32 drafts; a block has 7."""
SCHEDULED: Any = SimpleNamespace(total_num_scheduled_tokens=3)


@pytest.fixture(autouse=True)
def _executor_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    called_for = MultiprocExecutor.take_draft_token_ids
    monkeypatch.setattr(MultiprocExecutor, "take_draft_token_ids", called_for)


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What vLLM's scheduler was told, in order."""
    told: list[Any] = []

    def start(self: Any, *, vllm_config: Any) -> None:
        self.vllm_config, self.max_num_running_reqs, self.requests = vllm_config, 4, {}
        self.num_spec_tokens = vllm_config.speculative_config.num_speculative_tokens

    def update(_: Any, *step: Any) -> str:
        told.append(step)
        return "outputs"

    monkeypatch.setattr(Mode, "of", lambda _: SimpleNamespace(draft_width=7))
    monkeypatch.setattr(ours, "few_rows", lambda _: None)
    monkeypatch.setattr(Scheduler, "__init__", start)
    monkeypatch.setattr(Scheduler, "update_from_output", update)
    monkeypatch.setattr(Scheduler, "update_draft_token_ids", lambda _, drafts: told.append(drafts))
    return told


def test_no_request_is_padded_with_placeholders(happened: list[Any]) -> None:
    """For one to four requests. vLLM pads unless lengths are said to come from a table."""
    assert DFlashScheduler(vllm_config=WHOLE).dynamic_sd_lookup == [7] * 5


def test_drafts_are_taken_behind_the_tokens(happened: list[Any]) -> None:
    """vLLM counts a request's tokens first, and leaves out requests that have ended."""
    drafts = DraftTokenIds(["a"], [[1, 2]])
    output: Any = SimpleNamespace()
    DRAFTS.attach(output, drafts)
    assert DFlashScheduler(vllm_config=WHOLE).update_from_output(SCHEDULED, output) == "outputs"
    assert happened == [(SCHEDULED, output), drafts]


def test_free_drafts_are_those_of_the_step(happened: list[Any]) -> None:
    first: Any = SimpleNamespace()
    second: Any = SimpleNamespace()
    FREE_DRAFTS.attach(first, {"a": 5})
    scheduler = DFlashScheduler(vllm_config=WHOLE)
    for output, expected in ((first, {"a": 5}), (second, {})):
        scheduler.update_from_output(SCHEDULED, output)
        assert scheduler.free_drafts == expected


def test_room_is_kept_for_blocks_and_not_for_the_most_drafts_there_could_be(
    happened: list[Any],
) -> None:
    """Other code in the process, such as the worker, reads the whole config. It stays as it is."""
    scheduler = DFlashScheduler(vllm_config=WHOLE)
    found = scheduler.vllm_config
    assert found.speculative_config is not None
    assert found.speculative_config.num_speculative_tokens == 7
    assert found.speculative_config.method == "dflash"
    assert found.cache_config is WHOLE.cache_config
    assert WHOLE.speculative_config.num_speculative_tokens == 32


def test_a_step_is_scheduled_with_room_for_blocks_and_may_return_more_drafts(
    happened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Scheduler, "schedule", lambda self: SimpleNamespace(room=self.num_spec_tokens)
    )
    scheduler = DFlashScheduler(vllm_config=WHOLE)
    for _ in range(2):
        step: Any = scheduler.schedule()
        assert (step.room, step.num_spec_tokens_to_schedule) == (7, 32)


def test_accepted_drafts_are_counted_for_as_many_as_there_could_be(happened: list[Any]) -> None:
    scheduler = DFlashScheduler(vllm_config=WHOLE)
    scheduler.log_stats = True
    counted = None
    for accepted in (32, 3):
        counted = scheduler.make_spec_decoding_stats(
            counted,
            num_draft_tokens=32,
            num_accepted_tokens=accepted,
            num_invalid_spec_tokens=None,
            request_id="a",
        )
    assert counted is not None
    assert counted.num_accepted_tokens_per_pos == [2] * 3 + [1] * 29


def test_vllm_reckons_the_room_of_a_block(tmp_path: Path) -> None:
    """It reads the config that it is given, in several places."""
    pair = make_pair(tmp_path)
    asked = {"method": "dflash", "model": str(pair.drafter)}
    args = EngineArgs(str(pair.target), skip_tokenizer_init=True, speculative_config=asked)
    whole = args.create_engine_config()
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
    assert drafts_come_with_the_output(whole) == come_along


@pytest.mark.parametrize(("comes_along", "taken"), [(True, None), (False, "called for")])
def test_workers_are_called_for_drafts_that_do_not_come_along(
    happened: list[Any], monkeypatch: pytest.MonkeyPatch, comes_along: bool, taken: str | None
) -> None:
    monkeypatch.setattr(MultiprocExecutor, "take_draft_token_ids", lambda _: "called for")
    monkeypatch.setattr(v1_scheduler, "drafts_come_with_the_output", lambda config: config[0])
    for _ in range(2):  # a second engine in the process changes nothing
        DFlashScheduler(vllm_config=WHOLE)
    executor: Any = SimpleNamespace(vllm_config=[comes_along])
    assert MultiprocExecutor.take_draft_token_ids(executor) == taken


def test_an_engine_starts_only_where_its_seams_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Seam("vllm.v1.core.sched.scheduler:Scheduler.gone", None)
    monkeypatch.setattr(ours, "ENGINE", (gone,))
    with pytest.raises(UnsupportedVllmError, match=r"Scheduler\.gone"):
        build_scheduler()
