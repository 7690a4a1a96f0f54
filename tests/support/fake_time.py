"""A clock for tests."""


class FakeTime:
    """`time`, as the modules under test see it."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter
