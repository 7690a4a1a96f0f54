"""The start-up profile, on a clock of the test's own."""

import pytest

from support.fake_time import FakeTime
from vllm_dflash.engine import profile
from vllm_dflash.engine.profile import measure_curve, profiled_rows, target_alone


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()
    monkeypatch.setattr(profile, "time", time)
    return time


def test_a_profile_stops_when_its_time_is_up(fake: FakeTime) -> None:
    runs: list[int] = []

    def run(count: int) -> None:
        runs.append(count)
        fake.now += 0.01 * count

    curve = measure_curve(run, (1, 2, 4, 8, 16), lambda seconds: seconds, budget=0.15)
    assert sorted(set(runs)) == [1, 2, 4]  # 3 * (0.01 + 0.02 + 0.04) > 0.15
    assert float(curve.at(3)) == pytest.approx(0.03)
    assert float(curve.at(16)) == pytest.approx(0.16)  # goes on with the last slope


def test_profiled_batches_are_never_longer_than_their_requests_may_be() -> None:
    """A batch that is neither of single rows nor evenly filled would read beyond its cache."""
    for max_requests, most in ((64, 512), (100, 1600), (1, 8), (256, 300)):
        rows = profiled_rows(max_requests, most)
        assert all(count <= max_requests or count % max_requests == 0 for count in rows)
        assert rows == sorted(set(rows))
        assert rows[-1] <= most
        assert len(rows) >= 2


def test_the_drafter_is_back_after_a_profile_that_failed() -> None:
    class Drafter:
        runs_target_alone = False

    def fail() -> None:
        with target_alone(Drafter):
            assert Drafter.runs_target_alone
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not Drafter.runs_target_alone
