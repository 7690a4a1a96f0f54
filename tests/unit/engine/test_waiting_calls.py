"""Whether the count of waiting calls sees them all."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.waiting_calls import waits_noted

X = torch.arange(4.0)
HERE = str(Path(__file__).parent)


@pytest.mark.parametrize(
    ("kind", "look"),
    [
        ("cpu", lambda: X.cpu()),
        ("numpy", lambda: X.numpy()),
        ("to", lambda: X.to("cpu", non_blocking=True)),
        ("tolist", lambda: X.tolist()),
        ("value", lambda: X.sum().item()),
        ("value", lambda: bool((X > 0).any())),
        ("value", lambda: int(X[0])),
        ("value", lambda: max(X)),
        ("nonzero", lambda: X.nonzero()),
        ("nonzero", lambda: torch.where(X > 1)),
        ("masked_select", lambda: X.masked_select(X > 1)),
        ("unique", lambda: X.unique()),
        ("repeat_interleave", lambda: X.repeat_interleave(X.long())),
        ("mask as index", lambda: X[X > 1]),
        ("mask as index", lambda: X.clone().__setitem__(X > 1, torch.zeros(2))),
    ],
)
def test_what_waits_is_noted(kind: str, look: Callable[[], object]) -> None:
    found = Counter[str]()
    with waits_noted(found):
        look()
    assert not found  # the call is not in our code
    with waits_noted(found, folder=HERE):
        look()
    assert {name.split(" at ")[0] for name in found} == {kind}
    assert all("test_waiting_calls.py:" in name for name in found)


def test_what_does_not_wait_is_not() -> None:
    found = Counter[str]()
    with waits_noted(found, folder=HERE):
        y = X[torch.tensor([1, 2])] + X[1:3].sum()
        y[0] = 3.0
        torch.where(y > 1, y, 0.0).copy_(y).masked_fill_(y > 2, 0.0).sort().values.shape[0]
    assert not found
