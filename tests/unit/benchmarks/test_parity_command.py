"""What `benchmarks/parity` returns and prints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parity import check
from parity.parity_command import DIFFERS, EQUAL, main
from parity.parity_report import HINTS, Acceptance, ParityReport, Stage
from support.pairs import Pair

CLEAN = (Stage("tap of layer 1", 2e-6, 1e-6, 0, 0),)
FAULTY = (
    Stage("tap of layer 1", 1e-6, 1e-6, 0, 0),
    Stage("embedding", 0.5, 0.5, 1, 2),
    Stage("layer 0", float("inf"), 1e-6, 0, 0),
)


@pytest.mark.parametrize(
    ("stages", "nan_drafts", "code"), [(CLEAN, 0, EQUAL), (FAULTY, 0, DIFFERS), (CLEAN, 1, DIFFERS)]
)
def test_tables_and_json_name_the_culprit(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    stages: tuple[Stage, ...],
    nan_drafts: int,
    code: int,
) -> None:
    about: dict[str, Any] = {"drafter": "[red]d", "target": "t[/red][/x]", "runner": "v1"}
    about |= {"dtype": "float32", "tolerance": 1e-4, "nan_drafts": nan_drafts}
    report = ParityReport(**about, stages=stages, acceptance=(Acceptance([3, 1], [3, 2]),))
    monkeypatch.setattr(check, "check_parity", lambda *_, **__: report)
    words = ["d", "--target", "t"]
    assert main(words) == code
    out = capfd.readouterr().out
    assert "[red]d for t[/red][/x]: runner v1" in out
    marked = [line for line in out.splitlines() if "first difference" in line]
    assert main([*words, "--json"]) == code
    written = json.loads(capfd.readouterr().out)
    assert written["schema"] == "vllm-dflash.parity/2"
    assert written["verdict"] == ("equal" if code == EQUAL else "differs")
    if stages is not FAULTY:
        assert (written["culprit"], marked) == (None, [])
        return
    assert (written["culprit"], written["cause"]) == ("embedding", HINTS["embedding"])
    assert [stage["end_to_end"] for stage in written["stages"]] == [1e-6, 0.5, None]
    (line,) = marked
    assert "embedding" in line
    assert "worst at prompt 2, step 3" in line


def test_it_takes_one_rank(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 2.*leave it out.*verify .*-- -"):
        check.check_parity(str(pair.drafter), str(pair.target), tensor_parallel_size=2)
