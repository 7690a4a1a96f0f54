"""Waits of the host, on an emulated GPU that runs only what is waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from emulated import races, torch_cuda
from vllm_dflash.engine.v2 import v2_profile
from vllm_dflash.engine.v2.exchange import HostCopy

pytestmark = pytest.mark.emulated


@pytest.fixture(autouse=True)
def _nothing_is_queued() -> None:
    torch.cuda.synchronize()
    torch_cuda.set_schedule(torch_cuda.Schedule.LATEST)


def is_anything_queued() -> bool:
    return any(torch_cuda.device().pending().values())


def test_a_report_is_waited_for_and_not_the_next_steps() -> None:
    """Both are under way, as when steps are scheduled ahead; each belongs to its own step."""
    outcomes = torch.full((3, 2), 1.0, device="cuda")
    copies = torch.cuda.Stream()
    of_this_step = HostCopy(copies, outcomes)
    of_this_step.before_writing()
    outcomes.fill_(2.0)
    of_the_next = HostCopy(copies, outcomes)
    assert (of_this_step.wait()[0] == 1.0).all()
    assert is_anything_queued()  # the next step is not over, and need not be
    assert (of_the_next.wait()[0] == 2.0).all()
    assert (of_this_step.wait()[0] == 1.0).all()


@pytest.mark.parametrize("waits", [False, True])
def test_a_report_is_written_only_after_it_is_copied(*, waits: bool) -> None:
    outcomes = torch.full((3, 2), 1.0, device="cuda")
    with races.found() as missing:
        report = HostCopy(torch.cuda.Stream(), outcomes)
        if waits:
            report.before_writing()
        outcomes.fill_(2.0)
        torch.cuda.synchronize()
    assert (missing == {}) == waits


@pytest.mark.parametrize("with_block", [False, True])
def test_a_step_is_timed_up_to_its_end(*, with_block: bool) -> None:
    """Its launch alone would take as long for any number of rows."""
    hidden = torch.zeros(4, 8, device="cuda")
    runner: Any = SimpleNamespace(
        _dummy_run=lambda *_, **__: (hidden.add_(1.0), None),
        prepare_dummy_attn=None,
        model_state=SimpleNamespace(prepare_attn=None),
        model=SimpleNamespace(compute_logits=lambda hidden: hidden + 1.0),
        vocab_size=8,
        speculator=SimpleNamespace(runs_target_alone=False),
    )
    step = v2_profile._dummy_steps(runner)[with_block]
    step(4)
    assert not is_anything_queued()
