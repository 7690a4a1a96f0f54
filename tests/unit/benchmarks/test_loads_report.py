"""Tables of `benchmarks/loads --where`, from numbers made up here."""

from __future__ import annotations

from typing import Any

from loads.report import parts_tables
from loads.step_times import KINDS, OF_A_KIND
from loads.workload import SHORT
from vllm_dflash.tools.bench.bench_plan import CLOSED

NO_KINDS = {f"{kind}: {what}": 0.0 for kind in KINDS for what in OF_A_KIND}
PLAIN = NO_KINDS | {"steps": 10, "tokens": 10, "seconds": 0.25, "target": 0.2, "draft": 0.0}
NATIVE = NO_KINDS | {"steps": 4, "tokens": 8, "seconds": 0.2, "target": 0.1, "draft": 0.06}
NATIVE |= {"context": 0.02}
OURS = NATIVE | {"draft": 0.03, "planning": 0.01}


def spent_by(side: str, spent: dict[str, float], setting: int, load: str) -> dict[str, Any]:
    return {"load": load, "setting": setting, "side": side, "result": {"spent": spent}}


WHERE = [
    spent_by(side, spent, setting, CLOSED)
    for setting in (1, 4)
    for side, spent in (("plain", PLAIN), ("native K=3", NATIVE), ("ours", OURS))
]


def test_parts_of_steps() -> None:
    per_step, per_token, kinds = parts_tables(WHERE)
    assert kinds.rows == []
    parts = ["target", "draft", "context", "planning", "engine", "all"]
    columns = ["concurrency", "side", *parts, "tokens per step"]
    assert per_step.columns == per_token.columns == columns
    assert per_step.rows[0] == ["1", "plain", "20.00", "0.00", "", "", "5.00", "25.00", "1.00"]
    numbers = ["12.50", "7.50", "2.50", "", "2.50", "25.00", "2.00"]
    assert per_token.rows[4] == ["4", "native K=3", *numbers]
    assert "ms per step, decoding alone" in per_step.title
    numbers = ["12.50", "3.75", "2.50", "1.25", "5.00", "25.00", "2.00"]
    assert per_token.rows[5] == ["4", "ours", *numbers]


def test_kinds_of_steps() -> None:
    kind = "prompts, drafts"
    numbers = dict(zip(OF_A_KIND, (4, 0.05, 400, 10, 6), strict=True))
    spent = PLAIN | {f"{kind}: {what}": number for what, number in numbers.items()}
    _, per_token, kinds = parts_tables([spent_by("ours", spent, 1, SHORT)])
    assert per_token.title == "short: where the time goes, ms per output token"
    assert kinds.rows == [["1", "ours", kind, "4", "20%", "100.0", "2.5", "1.5", "12.5", "120.0"]]
