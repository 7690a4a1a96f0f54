"""`benchmarks/host_time.py`: what it makes of rounds that are made up here."""

from __future__ import annotations

from host_time import NATIVE, SIDES, UNDRAFTED, Round, report

from vllm_dflash.tools.bench.sides import OURS, PLAIN


def a_round(milliseconds: float, graphs: float, waits: int = 0) -> Round:
    return Round(milliseconds=[milliseconds, milliseconds, 100.0], graphs=graphs, waits=waits)


def rounds_of(factors: dict[str, float]) -> dict[str, list[Round]]:
    """Over five rounds the machine becomes slower and slower, for all sides alike."""
    return {
        side: [a_round(factors[side] * slowness, SIDES[side]) for slowness in (1, 2, 4, 8, 16)]
        for side in SIDES
    }


def test_ratios_are_of_the_same_round() -> None:
    found = rounds_of({PLAIN: 1.0, NATIVE: 2.0, OURS: 1.5, UNDRAFTED: 1.25})
    found[OURS][0] = a_round(3.0, SIDES[OURS])
    (times, ratios), notes = report({8: found})
    assert times.rows == [["8", "5", "4.00", "8.00", "6.00", "5.00"]]
    assert ratios.columns[2] == f"{OURS} / {NATIVE}"
    assert ratios.rows == [
        ["8", "5", "0.75 (0.75 - 0.75)", "1.25 (1.25 - 1.25)", "2.00 (2.00 - 2.00)"]
    ]
    assert notes == []


def test_quartiles_are_of_ratios() -> None:
    found = rounds_of(dict.fromkeys(SIDES, 1.0))
    for number, one in enumerate(found[OURS]):  # 1, 2, 3, 4 and 5 times as long
        one["milliseconds"] = [(1 + number) * taken for taken in one["milliseconds"]]
    (_, ratios), _ = report({1: found})
    assert ratios.rows[0][2] == "3.00 (2.00 - 4.00)"


def test_it_says_which_sides_ran_eagerly_or_waited() -> None:
    found = rounds_of(dict.fromkeys(SIDES, 1.0))
    found[UNDRAFTED][3] = a_round(8.0, graphs=1)
    found[NATIVE][:2] = [a_round(1.0, SIDES[NATIVE], waits=1), a_round(2.0, SIDES[NATIVE], waits=9)]
    _, notes = report({32: found})
    of_native, of_undrafted = notes
    assert of_native.startswith(f"{NATIVE}, 32 requests: in 2 rounds")
    assert of_undrafted.startswith(f"{UNDRAFTED}, 32 requests: in 1 rounds")
