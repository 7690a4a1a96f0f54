"""When to probe, with numbers that are powers of two where possible."""

import pytest

from vllm_dflash.planning.planner import ProbeSchedule


def test_probes_spend_the_saved_share_of_the_time() -> None:
    """1.5% at first: a probe of 3 ms after 200 ms, and not a step earlier."""
    probes = ProbeSchedule()
    due = [probes.is_due(0.05, 0.00299, is_close=False) for _ in range(4)]
    assert due == [False, False, False, True]
    assert probes.saved == 0.0


def test_the_share_halves_with_every_probe_and_ends_at_two_thousandths() -> None:
    probes = ProbeSchedule()
    shares = []
    for _ in range(5):
        shares.append(probes.share)
        assert probes.is_due(1000.0, 0.001, is_close=False)
    assert shares == pytest.approx([0.015, 0.0075, 0.00375, 0.002, 0.002])


@pytest.mark.parametrize(
    ("share", "is_close", "saved"),
    [(0.002, False, 0.002), (0.002, True, 0.005), (0.015, True, 0.015)],
)
def test_where_drafting_nearly_pays_the_share_is_five_thousandths_at_least(
    share: float, is_close: bool, saved: float
) -> None:
    probes = ProbeSchedule(share=share)
    assert not probes.is_due(1.0, 1.0, is_close=is_close)
    assert probes.saved == pytest.approx(saved)
    assert probes.share == share
