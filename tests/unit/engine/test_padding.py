"""Placeholders that vLLM pads new requests with are not taken for drafts that were rejected."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu_worker import Worker

from vllm_dflash.engine.length_control import LengthControl
from vllm_dflash.engine.padding import newly_admitted
from vllm_dflash.engine.v1.proposer import PlannedProposer
from vllm_dflash.engine.v2.nan_counter import NanCounter
from vllm_dflash.engine.v2.speculator import PlannedSpeculator
from vllm_dflash.engine.v2.synchronous import SynchronousLengths
from vllm_dflash.engine.worker import DFlashGPUWorker
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
    """The step before, in which these took what their texts foretold."""
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


def observe_v2(admitted: set[str], from_text: tuple[str, ...] = (), *, is_async: bool) -> Any:
    speculator: Any = object.__new__(PlannedSpeculator)
    speculator.lengths, speculator.nan_counter = LengthControl(K), NanCounter(torch.device("cpu"))
    speculator.lengths.end(took_from_texts(from_text))
    speculator.newly_admitted = admitted
    speculator.synchronous = speculator._verified = None
    speculator.enable_adaptive_verification = False
    if not is_async:
        confidence = torch.zeros(3, K)
        speculator.synchronous = SynchronousLengths(
            speculator.lengths, K, confidence, runs_ahead=False
        )
    speculator.runs_target_alone = False
    speculator.num_speculative_steps = K
    speculator.engine_config = SimpleNamespace(num_speculative_tokens=K)
    speculator.req_states = SimpleNamespace(max_seq_len=np.full(3, 100))
    batch = SimpleNamespace(
        req_ids=NAMES,
        num_reqs=3,
        num_tokens=9,
        num_draft_tokens_per_req=np.array([3, 3, 0]),
        num_draft_tokens=6,
        num_computed_tokens_np=np.full(3, 10),
        num_scheduled_tokens=np.array([4, 4, 1]),
        idx_mapping_np=np.arange(3),
    )
    inputs: tuple[Any, ...] = batch, {}, {}, None, None, SAMPLED, REJECTED
    speculator.propose(*inputs, num_speculative_tokens=0)
    tokens = [[1] * count for count in SAMPLED.tolist()]
    output = SimpleNamespace(
        model_runner_output=None, get_output=lambda: SimpleNamespace(sampled_token_ids=tokens)
    )
    speculator.counted(output).get_output()
    return speculator.collect_statistics()


@pytest.mark.parametrize(
    ("admitted", "counted"),
    [(set(), (2, 6, 2)), ({"new"}, (1, 3, 2)), ({"old", "new", "elsewhere"}, (0, 0, 0))],
)
@pytest.mark.parametrize("side", ["V1", "V2", "V2, asynchronous"])
def test_placeholders_are_no_drafts(
    side: str,
    admitted: set[str],
    counted: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DFlashSpeculator, "propose", lambda *_, **__: torch.zeros(3, K))
    monkeypatch.setattr(PlannedSpeculator, "length_limit", 100)
    if side == "V1":
        statistics = observe_v1(admitted)
    else:
        statistics = observe_v2(admitted, is_async=side != "V2")
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
@pytest.mark.parametrize("side", ["V1", "V2"])
def test_free_drafts_are_counted_as_such(
    side: str,
    admitted: set[str],
    from_text: tuple[str, ...],
    counted: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DFlashSpeculator, "propose", lambda *_, **__: torch.zeros(3, K))
    monkeypatch.setattr(PlannedSpeculator, "length_limit", 100)
    if side == "V1":
        found = observe_v1(admitted, from_text)
    else:
        found = observe_v2(admitted, from_text, is_async=False)
    assert counted == (
        found.free_verifications,
        found.free_draft_tokens,
        found.free_accepted_tokens,
    )


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_without_a_block_is_none_for_vllm_either(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 then stores context and does no more. A dummy run is what the runner says."""
    seen: list[Any] = []

    def propose(*_: Any, num_speculative_tokens: int | None = None, **__: Any) -> torch.Tensor:
        seen.append(num_speculative_tokens)
        return torch.zeros(3, K)

    monkeypatch.setattr(DFlashSpeculator, "propose", propose)
    monkeypatch.setattr(PlannedSpeculator, "length_limit", 100)
    observe_v2(set(), is_async=is_async)
    assert seen == [0]


def test_each_request_has_the_limit_of_its_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the batch are not rows of the runner's states."""
    monkeypatch.setattr(PlannedSpeculator, "length_limit", 90)
    seen: list[Any] = []
    speculator: Any = object.__new__(PlannedSpeculator)
    speculator.runs_target_alone, speculator.num_speculative_steps = False, K
    speculator.newly_admitted = set()
    speculator.engine_config = SimpleNamespace(num_speculative_tokens=K)
    speculator.req_states = SimpleNamespace(max_seq_len=np.array([50, 60, 70, 100]))

    def propose(*_: Any, limits: Any, **__: Any) -> torch.Tensor:
        seen.append(limits.tolist())
        return torch.zeros(2, K)

    speculator.synchronous = SimpleNamespace(propose=propose, trees=None)
    batch = SimpleNamespace(num_reqs=2, idx_mapping_np=np.array([3, 1]))
    speculator.propose(batch, {}, {}, None, None, SAMPLED, REJECTED)
    assert seen == [[90, 60]]


def test_new_and_resumed_requests_have_no_drafts_yet() -> None:
    assert newly_admitted(scheduled(new=("a", "b"), resumed=("c",))) == {"a", "b", "c"}
    assert newly_admitted(scheduled()) == set()


@pytest.mark.parametrize("kind", [PlannedProposer, PlannedSpeculator])
def test_a_worker_tells_the_drafter_before_the_step_runs(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker: Any = object.__new__(DFlashGPUWorker)
    worker.drafter, worker._figures = object.__new__(kind), None
    told: list[Any] = []
    ended: list[set[str]] = []
    texts = SimpleNamespace(end=ended.append)
    if kind is PlannedProposer:
        worker.drafter.texts = texts
    else:
        worker.drafter.synchronous = SimpleNamespace(texts=texts, trees=None)

    def run(self: Any, step: Any) -> None:
        told.append((self.drafter.newly_admitted, list(ended)))

    monkeypatch.setattr(Worker, "execute_model", run)
    worker.execute_model(scheduled(new=("a",)))
    worker.execute_model(scheduled(ended=("a",)))
    # What ends with a step is known before the step is run, which takes its text away.
    assert told == [({"a"}, [set()]), (set(), [set(), {"a"}])]
