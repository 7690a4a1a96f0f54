"""When to probe, with numbers that are powers of two where possible."""

from itertools import count

import numpy as np
import pytest

from support.planner_world import names, step_of
from vllm_dflash.planning.probes import PlainChecks, ProbeSchedule


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


def test_plain_decoding_is_checked_more_often_where_it_is_faster_than_expected() -> None:
    """Such a check is no accident of the batch: others follow until the estimate is right."""

    def steps_until_due(checks: PlainChecks) -> int:
        return next(step for step in count(1) if checks.are_due(4, 1.2))

    checks, plain = PlainChecks(8), step_of(names(4), np.zeros(4, int), np.zeros(4, int))
    drafted = step_of(names(4), np.ones(4, int), np.zeros(4, int))
    for _ in range(20):
        checks.note(plain, 0.01, 0.01)
    seldom = steps_until_due(checks)
    assert seldom > 50
    checks.note(drafted, 0.005, 0.01)  # tells nothing about steps without drafts
    checks.note(plain, 0.0094, 0.01)
    assert steps_until_due(checks) == seldom
    checks.note(plain, 0.0092, 0.01)
    assert steps_until_due(checks) < seldom / 3
    for _ in range(5):
        checks.note(plain, 0.0092, 0.01)
    assert steps_until_due(checks) <= 3
