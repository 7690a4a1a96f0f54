"""Prompt sets in the file formats in which they are published; all texts are made up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("pandas")

import pandas

from support import DEMO, ROOT
from support.seam_table import paths_of
from vllm_dflash.tools import cli
from vllm_dflash.tools.bench.bench_datasets import SETS, SPEED_BENCH, Asked, read_dataset
from vllm_dflash.tools.bench.comparison import Comparison
from vllm_dflash.tools.console import COULD_NOT_RUN

FILES = ROOT / "tests" / "data" / "datasets"


def file_of(name: str) -> Path:
    return FILES / (name if name == SPEED_BENCH else f"{name}.jsonl")


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "prompt", "tokens"),
    [
        ("spec_bench", "Describe a harbour at night.", 256),
        ("gsm8k", "A boat carries 12 crates and loses 3. How many are left?", 256),
        ("humaneval", 'def double(number):\n    """Twice the number."""\n', 256),
    ],
)
def test_first_turns_as_they_stand_there(name: str, prompt: str, tokens: int) -> None:
    first = read_dataset(name, file_of(name))[0]
    assert (first.prompt, first.tokens) == (prompt, tokens)


def test_every_set_has_a_test_file_and_a_seam() -> None:
    held = {path.partition(":")[2].partition(".")[0] for path in paths_of("datasets")}
    assert {reader for reader, _ in SETS.values()} <= held
    for name in SETS:
        assert read_dataset(name, file_of(name), tokens=7)[0].tokens == 7


def test_categories_take_turns() -> None:
    found = read_dataset("spec_bench", file_of("spec_bench"), tokens=5)
    assert [one.category for one in found] == ["writing", "translation", "writing", "writing"]
    assert found[1] == Asked("translation", "Translate into German: The ferry is late.", 5)
    assert found[2].prompt == "Write a letter to a lighthouse."  # its own, not a neighbour's
    categories = {one.category for one in read_dataset("gsm8k", file_of("gsm8k"))}
    assert categories == {"gsm8k"}  # a set without categories


@pytest.mark.parametrize("form", ["json", "parquet"])
def test_files_of_the_hub_are_read_in_each_form(tmp_path: Path, form: str) -> None:
    file = tmp_path / f"train.{form}"
    rows = pandas.DataFrame(lines_of(file_of("mt_bench")))
    if form == "json":
        file.write_text(json.dumps(rows.to_dict("records")))
    else:
        pytest.importorskip("pyarrow")
        rows.to_parquet(file)
    assert read_dataset("mt_bench", file) == read_dataset("mt_bench", file_of("mt_bench"))


@pytest.mark.parametrize(
    ("name", "path", "messages"),
    [
        (
            "spec_bench",
            "nowhere.jsonl",
            ["'nowhere.jsonl' is not a file", "wget https://", "Spec-Bench"],
        ),
        ("gsm8k", str(FILES), ["is not a file", "hf download", "openai/gsm8k"]),
        (
            "gsm8k",
            str(FILES / "custom.jsonl"),
            ["cannot be read as gsm8k", "'question'", "hf down"],
        ),
        ("custom", None, ["needs --dataset-path", '{"prompt"']),
    ],
)
def test_a_missing_file_names_where_to_get_it(
    capsys: pytest.CaptureFixture[str], name: str, path: str | None, messages: list[str]
) -> None:
    given = [] if path is None else ["--dataset-path", path]
    assert cli.main(["bench", "--dataset-name", name, *given]) == COULD_NOT_RUN
    error = capsys.readouterr().err
    assert [message for message in messages if message not in error] == []


def test_a_path_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--dataset-path", str(FILES / "custom.jsonl")]) == COULD_NOT_RUN
    assert "--dataset-path needs --dataset-name" in capsys.readouterr().err


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ValueError, match=r"pandas.*pip install.*bench"):
        read_dataset("gsm8k", file_of("gsm8k"))


def test_from_options_to_what_is_measured(tmp_path: Path, comparisons: list[Comparison]) -> None:
    common = ["bench", "--out", str(tmp_path), "--target", str(DEMO / "target"), "--drafter"]
    common += [str(DEMO / "drafter"), "--dataset-name", "mt_bench"]
    common += ["--dataset-path", str(file_of("mt_bench"))]
    thinking = '{"enable_thinking": false}'
    more = ["--num-prompts", "2", "--output-len", "9", "--temperature", "0.5"]
    assert cli.main([*common, *more, "--chat-template-kwargs", thinking]) == 0
    assert cli.main([*common, "--skip-chat-template", "--ignore-eos"]) == 0
    first, second = (one.dataset for one in comparisons)
    assert first is not None
    assert [one.tokens for one in first.requests] == [9, 9]
    assert first.sampling == {"temperature": 0.5, "ignore_eos": False}
    assert first.template == {"enable_thinking": False}
    assert second is not None
    assert (second.sampling["ignore_eos"], second.template) == (True, None)
    assert len(second.requests) == 3
    workload = comparisons[0].workload
    assert (workload.loads, workload.concurrency) == ((), (1, 8))
    assert "plus the time for 2 requests a round on each" in comparisons[0].announcement()
