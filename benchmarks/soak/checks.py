"""Checks of a soak's numbers: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression, median

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits of what a soak may show."""

    growth: float
    """Memory of all server processes, in MiB a minute over the second half."""
    slowdown: float
    """Last third's inter-token latency over the first's; first third's tokens/s over the last's."""
    shutdown: float
    """Seconds from Ctrl-C to the end of the last process."""


@dataclass(frozen=True)
class Check:
    """Something that must hold, and what was seen."""

    name: str
    held: bool
    seen: str


def memory_growth(seconds: Sequence[float], num_bytes: Sequence[float]) -> float:
    """Return MiB a minute over the second half of the time. The first half may fill caches.

    Raises:
        ValueError: there are fewer than two samples in it.
    """
    middle = (seconds[0] + seconds[-1]) / 2
    late = [one for one in zip(seconds, num_bytes, strict=True) if one[0] >= middle]
    return 60.0 / MEBIBYTE * linear_regression(*zip(*late, strict=True)).slope


def first_and_last_third(
    seconds: Sequence[float], values: Sequence[float], start: float, end: float
) -> tuple[float, float]:
    """Return medians of the values in the first and the last third; NaN if there are none."""
    third, timed = (end - start) / 3, list(zip(seconds, values, strict=True))
    early = [value for moment, value in timed if moment < start + third]
    late = [value for moment, value in timed if moment >= end - third]
    return median(early or [float("nan")]), median(late or [float("nan")])


def rates(seconds: Sequence[float], counts: Sequence[float]) -> list[float]:
    """Return the increase of a counter per second, between neighbouring samples."""
    return [
        (later - earlier) / (end - start)
        for start, end, earlier, later in zip(
            seconds, seconds[1:], counts, counts[1:], strict=False
        )
    ]


def check_outcomes(outcomes: Mapping[str, Mapping[str, int]], faults: Sequence[str]) -> list[Check]:
    """Check that every behaviour took place, and that each ended as it should.

    `outcomes`: behaviour -> status -> count. `faults`: outcomes that were not allowed.
    """
    absent = [name for name, statuses in outcomes.items() if not sum(statuses.values())]
    total = sum(sum(statuses.values()) for statuses in outcomes.values())
    return [
        Check(
            "every behaviour took place",
            not absent,
            f"{total} requests" + (f"; never: {', '.join(absent)}" if absent else ""),
        ),
        Check(
            "no error but the clients' own",
            not faults,
            "none" if not faults else f"{len(faults)}, first: {faults[0]}",
        ),
    ]


def check_growth(growth: float, limits: Limits) -> Check:
    """Check that memory is flat."""
    return Check(
        "memory is flat",
        growth <= limits.growth,
        f"{growth:+.2f} MiB a minute over the second half (at most {limits.growth:g})",
    )


def check_speed(
    latencies: tuple[float, float], throughputs: tuple[float, float], limits: Limits
) -> list[Check]:
    """Check that latency (seconds) and throughput (tokens/s) are steady, last third against first.

    A value that was never measured (NaN) has not held, unless there is no limit for it: the first
    third of a short soak on a busy machine may bring no token.
    """
    slower = latencies[1] / latencies[0]
    fewer = throughputs[0] / throughputs[1] if throughputs[1] else float("inf")
    return [
        Check(
            "inter-token latency does not grow",
            slower <= limits.slowdown or limits.slowdown == float("inf"),
            f"{1000 * latencies[0]:.1f} ms in the first third, {1000 * latencies[1]:.1f} ms in the"
            f" last: x {slower:.2f} (at most {limits.slowdown:g})",
        ),
        Check(
            "tokens/s do not fall",
            fewer <= limits.slowdown,
            f"{throughputs[0]:.0f} in the first third, {throughputs[1]:.0f} in the last",
        ),
    ]


def check_idle(metrics: Mapping[str, float]) -> Check:
    """Check that nothing runs, nothing waits, and no cache block is held."""
    return Check(
        "nothing is left behind in the engine",
        not any(metrics.values()),
        ", ".join(f"{name} {value:g}" for name, value in metrics.items()),
    )


def check_answers(expected: str, answers: Sequence[str]) -> Check:
    """Check that one greedy prompt always gave the same text, and that it was not empty."""
    different = sum(answer != expected for answer in answers)
    return Check(
        "greedy answers stay the same",
        bool(expected) and bool(answers) and not different,
        f"{len(answers) - different} of {len(answers)} identical to the first",
    )


def check_end(
    seconds: float | None, exit_code: int | None, orphans: int, traceback: bool, limits: Limits
) -> list[Check]:
    """Check the log and the end of the server. `seconds` is None if it had to be killed."""
    in_time = seconds is not None and seconds <= limits.shutdown
    took = "it had to be killed" if seconds is None else f"exit code {exit_code} in {seconds:.1f} s"
    return [
        Check("no traceback in the log", not traceback, "there is one" if traceback else "none"),
        Check("Ctrl-C ends the server", in_time and exit_code == 0, took),
        Check("no process is left", not orphans, f"{orphans} left" if orphans else "none"),
    ]
