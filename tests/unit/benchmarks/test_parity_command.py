"""What `benchmarks/parity` returns and prints, and that an interrupted one leaves nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from parity import check
from parity.parity_command import DIFFERS, EQUAL, main
from parity.parity_report import HINTS, Acceptance, ParityReport, Stage
from support import DEMO
from support.pairs import Pair
from vllm_dflash.tools.console import COULD_NOT_RUN, INTERRUPTED
from vllm_dflash.tools.server import EngineDied

PAIR = [str(DEMO / "drafter"), "--target", str(DEMO / "target")]


def report(*stages: Stage, **changes: Any) -> ParityReport:
    fields: dict[str, Any] = {
        "drafter": "d",
        "target": "t",
        "runner": "v1",
        "dtype": "float32",
        "tolerance": 1e-4,
        "stages": stages,
        "acceptance": (Acceptance([3, 1], [3, 2]),),
        "nan_drafts": 0,
    }
    return ParityReport(**fields | changes)


CLEAN = report(Stage("tap of layer 1", 2e-6, 1e-6, 0, 0))
FAULTY = report(
    Stage("tap of layer 1", 1e-6, 1e-6, 0, 0),
    Stage("embedding", 0.5, 0.5, 1, 2),
    Stage("layer 0", float("inf"), 1e-6, 0, 0),
)


def answers(monkeypatch: pytest.MonkeyPatch, outcome: ParityReport | BaseException) -> None:
    def check_parity(*args: Any, **kwargs: Any) -> ParityReport:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(check, "check_parity", check_parity)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (CLEAN, EQUAL),
        (FAULTY, DIFFERS),
        (report(nan_drafts=1), DIFFERS),
        (ValueError("the pair does not fit"), COULD_NOT_RUN),
        (EngineDied(DEMO / "README.md"), COULD_NOT_RUN),
        (KeyError("a bug"), COULD_NOT_RUN),
        (KeyboardInterrupt(), INTERRUPTED),
    ],
    ids=["equal", "differs", "nan drafts", "does not fit", "engine died", "bug", "interrupted"],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    outcome: ParityReport | BaseException,
    code: int,
) -> None:
    answers(monkeypatch, outcome)
    assert main(PAIR) == code
    out, err = capfd.readouterr()
    if isinstance(outcome, Exception):
        assert not out
        assert str(outcome.args[0]) in err
        assert ("Traceback" in err) == isinstance(outcome, KeyError)
    if code == INTERRUPTED:
        assert err.endswith("parity: interrupted\n")


def test_json_names_the_culprit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answers(monkeypatch, FAULTY)
    main([*PAIR, "--json"])
    written = json.loads(capfd.readouterr().out)
    assert written["schema"] == "vllm-dflash.parity/2"
    assert (written["verdict"], written["culprit"]) == ("differs", "embedding")
    assert written["cause"] == HINTS["embedding"]
    assert [stage["end_to_end"] for stage in written["stages"]] == [1e-6, 0.5, None]


def test_tables_mark_the_first_difference(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answers(monkeypatch, replace(FAULTY, drafter="[red]d", target="t[/red][/x]"))
    main(PAIR)
    out = capfd.readouterr().out
    assert "[red]d for t[/red][/x]: runner v1" in out
    (marked,) = (line for line in out.splitlines() if "first difference" in line)
    assert "embedding" in marked
    assert "worst at prompt 2, step 3" in marked


def test_it_takes_one_rank(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 2.*leave it out.*verify .*-- -"):
        check.check_parity(str(pair.drafter), str(pair.target), tensor_parallel_size=2)
