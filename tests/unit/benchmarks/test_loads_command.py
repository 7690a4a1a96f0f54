"""What `python benchmarks/loads` refuses and sets up, before it starts an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm.platforms import current_platform

from loads.answers import START
from loads.comparison import LoadsComparison
from loads.loads_command import main
from loads.loads_setup import TRAINED_ON
from loads.step_times import TIMED
from support import DEMO
from vllm_dflash.tools.bench.comparison import Comparison
from vllm_dflash.tools.console import COULD_NOT_RUN

PAIR = ["--target", str(DEMO / "target"), "--drafter", str(DEMO / "drafter")]


def loads(tmp_path: Path, *arguments: str) -> int:
    return main(["--demo", str(DEMO), "--out", str(tmp_path / "out"), *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--load", "closed", "swing", "--temperature", "1"], "not for swing"),
        (["--as-it-is"], "is for the demo pair"),
        (["--load", "swing", "--max-num-seqs", "31"], "raise --max-num-seqs"),
        (["--dataset-name", "custom", "--where"], "--where is for loads and contexts"),
    ],
)
def test_refused_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert loads(tmp_path, *PAIR, *arguments) == COULD_NOT_RUN
    assert message in capsys.readouterr().err


def test_where_the_time_goes_is_told_by_timers_on_cpus_alone(
    tmp_path: Path, comparisons: list[Comparison], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loads(tmp_path, *PAIR, "--load", "closed", "short", "--where") == 0
    (comparison,) = comparisons
    assert comparison.workload.loads == ("closed", "short")
    arguments = comparison.engines.arguments
    assert (arguments["worker_extension_cls"], arguments["start"]) == (TIMED, START)
    assert "benchmarks" in arguments["environment"]["PYTHONPATH"]
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    assert loads(tmp_path, *PAIR, "--where") == COULD_NOT_RUN


def test_contexts_take_the_place_of_loads(tmp_path: Path, comparisons: list[Comparison]) -> None:
    """Engines then cache prefixes, and take requests that are long enough."""
    assert loads(tmp_path, "--as-it-is", "--context", "900", "--random-drafter") == 0
    (comparison,) = comparisons
    assert (comparison.workload.loads, comparison.workload.concurrency) == ((), (1, 4))
    assert isinstance(comparison, LoadsComparison)
    assert not comparison.tune_schedule
    engine = comparison.engines.arguments
    assert engine["max_model_len"] == 900 + 2 * 96 + 64
    assert engine["enable_prefix_caching"]
    config = json.loads((Path(engine["model"]) / "config.json").read_text())
    assert config["hidden_size"] == 256
    name = f"demo pair as it is; trained on {TRAINED_ON} tokens at a time: beyond, texts and"
    assert comparison.record.about["pair"] == f"{name} drafts are noise, random drafter"
    drafter = (comparison.record.sides[-1].speculative_config or {})["model"]
    assert drafter == str(tmp_path / "out" / "random_drafter")
