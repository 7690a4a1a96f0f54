"""Hazard 10: what changes after warm-up is counted."""

import gc
import weakref

import numba
import torch
from torch._dynamo.callback import callback_handler
from vllm.compilation.counter import compilation_counter

from vllm_dflash.engine.warm import WarmState


def test_a_buffer_that_moves_is_counted_once() -> None:
    buffers = [torch.zeros(4), torch.zeros(4)]
    state = WarmState(lambda: buffers)
    buffers[0] = torch.zeros(5)  # before it is warm, anything goes
    state.seal()
    assert state.to_dict() == {"captures_after_warmup": 0, "reallocations_after_warmup": 0}
    kept = buffers[1]  # lest the new one gets the old one's place
    buffers[1] = torch.zeros(4)
    assert kept.data_ptr() != buffers[1].data_ptr()
    assert state.to_dict()["reallocations_after_warmup"] == 1


def test_a_new_buffer_is_counted() -> None:
    buffers = [torch.zeros(4)]
    state = WarmState(lambda: buffers)
    state.seal()
    buffers.append(torch.zeros(4))
    assert state.to_dict()["reallocations_after_warmup"] == 1


def test_captures_and_compilations_are_counted() -> None:
    state = WarmState(list)
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2))
    state.seal()
    assert state.to_dict()["captures_after_warmup"] == 0
    compilation_counter.num_cudagraph_captured += 1
    torch.compile(lambda x: x * 3 + 2, backend="eager")(torch.zeros(2))
    compiled = state.to_dict()["captures_after_warmup"]
    compilation_counter.num_cudagraph_captured -= 1
    assert compiled == 2


def test_compilations_of_numba_are_counted() -> None:
    state, twice = WarmState(list), numba.njit(lambda x: 2 * x)
    twice(1)
    state.seal()
    twice(2)
    assert state.to_dict()["captures_after_warmup"] == 0
    twice(2.0)
    assert state.to_dict()["captures_after_warmup"] == 1


def test_nobody_keeps_a_state_whose_engine_has_ended() -> None:
    """Nor what it watches; and other engines' compilations are not told to it for ever."""
    before = {*callback_handler.start_callbacks}  # maybe of drafters that are about to go

    def told() -> int:
        return len({*callback_handler.start_callbacks} - before)

    owner = torch.nn.Linear(2, 2)  # as a drafter is, which the state is part of
    vars(owner)["warm"] = WarmState(owner.parameters)
    other = WarmState(list)
    assert told() == 2
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert (gone(), told()) == (None, 1)
    del other
    gc.collect()
    assert told() == 0
