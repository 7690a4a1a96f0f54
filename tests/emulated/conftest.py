"""Reset the device for each test: the latest schedule, the default stream, no counts."""

from collections.abc import Iterator

import pytest

from emulated import torch_cuda
from emulated.torch_cuda import Schedule


@pytest.fixture(autouse=True)
def _as_new() -> Iterator[None]:
    if not torch_cuda.is_installed():
        yield
        return
    import torch

    # A failed capture leaves its stream as the current one, on a real GPU as well.
    torch.cuda.set_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()
    torch_cuda.set_schedule(Schedule.LATEST)
    torch_cuda.device().forget_counts()
    yield
    torch_cuda.set_schedule(Schedule.LATEST)
