"""Placeholders that vLLM pads new requests with are not taken for drafts that were rejected."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu_worker import Worker

from vllm_dflash.engine.padding import newly_admitted
from vllm_dflash.engine.v1.length_control import LengthControl
from vllm_dflash.engine.v1.proposer import PlannedProposer
from vllm_dflash.engine.worker import DraftingWorker
from vllm_dflash.planning.step import Step

K = 3
NAMES = ["old", "new", "plain"]
SAMPLED, REJECTED = torch.tensor([3, 1, 1]), torch.tensor([1, 3, 0])
"""`old` had two of three drafts accepted, `new` all placeholders rejected, `plain` had none."""


def scheduled(
    new: tuple[str, ...] = (), resumed: tuple[str, ...] = (), ended: tuple[str, ...] = ()
) -> Any:
    return SimpleNamespace(
        finished_req_ids=set(ended),
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
    )


def took_from_texts(names: tuple[str, ...]) -> Step:
    """The step before, in which these took what their texts predicted."""
    from_text = np.ones(len(names), dtype=bool)
    return Step(names, np.ones(len(names), dtype=int), from_text=from_text)


def observe_v1(admitted: set[str], from_text: tuple[str, ...] = ()) -> Any:
    proposer: Any = object.__new__(PlannedProposer)
    proposer.lengths = LengthControl(K)
    proposer.lengths.end(took_from_texts(from_text))
    proposer.newly_admitted = admitted
    proposer.step = Step(NAMES, SAMPLED.numpy())
    metadata = SimpleNamespace(num_draft_tokens=[3, 3, 0])
    _, _, rejected = proposer.prepare_inputs_padded(None, metadata, SAMPLED)
    assert rejected.tolist() == REJECTED.tolist()  # their rows are no context all the same
    return proposer.collect_statistics()


@pytest.mark.parametrize(
    ("admitted", "counted"),
    [(set(), (2, 6, 2)), ({"new"}, (1, 3, 2)), ({"old", "new", "elsewhere"}, (0, 0, 0))],
)
def test_placeholders_are_no_drafts(admitted: set[str], counted: tuple[int, int, int]) -> None:
    """On V2: `test_counted_output.py`, `test_ahead_scheduling.py`."""
    statistics = observe_v1(admitted)
    found = statistics.verifications, statistics.draft_tokens, statistics.accepted_tokens
    assert found == counted


@pytest.mark.parametrize(
    ("admitted", "from_text", "counted"),
    [
        (set(), ("old", "gone"), (1, 3, 2)),
        (set(), ("new", "plain"), (1, 3, 0)),
        (set(), ("old", "new"), (2, 6, 2)),
        ({"old"}, ("old", "new"), (1, 3, 0)),
        (set(), (), (0, 0, 0)),
    ],
)
def test_free_drafts_are_counted_as_such(
    admitted: set[str], from_text: tuple[str, ...], counted: tuple[int, int, int]
) -> None:
    found = observe_v1(admitted, from_text)
    assert counted == (
        found.free_verifications,
        found.free_draft_tokens,
        found.free_accepted_tokens,
    )


def test_new_and_resumed_requests_have_no_drafts_yet() -> None:
    assert newly_admitted(scheduled(new=("a", "b"), resumed=("c",))) == {"a", "b", "c"}
    assert newly_admitted(scheduled()) == set()


def test_a_worker_tells_the_drafter_before_the_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    worker: Any = object.__new__(DraftingWorker)
    worker.drafter = object.__new__(PlannedProposer)
    told: list[Any] = []
    ended: list[set[str]] = []
    worker.drafter.texts = SimpleNamespace(end=ended.append)

    def run(self: Any, step: Any) -> None:
        told.append((self.drafter.newly_admitted, list(ended)))

    monkeypatch.setattr(Worker, "execute_model", run)
    worker.execute_model(scheduled(new=("a",)))
    worker.execute_model(scheduled(ended=("a",)))
    # What ends with a step is known before the step is run, which takes its text away.
    assert told == [({"a"}, [set()]), (set(), [set(), {"a"}])]
