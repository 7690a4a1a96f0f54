"""What `vllm-dflash bench` refuses before it starts a server, and what it would measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm.platforms import current_platform

pytest.importorskip("matplotlib")

from support import DEMO
from vllm_dflash.tools import cli
from vllm_dflash.tools.bench import bench_command
from vllm_dflash.tools.bench.bench_runs import Comparison
from vllm_dflash.tools.bench.bench_setup import client_flags
from vllm_dflash.tools.console import COULD_NOT_RUN, INTERRUPTED

TARGET = ["--target", str(DEMO / "target")]
NOT_WIDENED = [*TARGET, "--drafter", str(DEMO / "drafter")]
BREAK_EVEN = [*TARGET, "--break-even"]
SET = [*NOT_WIDENED, "--dataset-name"]
BESIDE = [*NOT_WIDENED, "--native-k", "--beside"]


def bench(tmp_path: Path, *arguments: str) -> int:
    try:
        return cli.main(["bench", "--out", str(tmp_path / "out"), *arguments])
    except SystemExit as stopped:
        return int(stopped.code or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*NOT_WIDENED, "--prompts", "nothing.jsonl"], "pass another --prompts"),
        ([*NOT_WIDENED, "--max-num-seqs", "31"], "raise --max-num-seqs"),
        ([*NOT_WIDENED, "--dataset-path", "a.jsonl"], "--dataset-path would have no effect"),
        ([*NOT_WIDENED, "--skip-chat-template"], "--skip-chat-template would have no effect"),
        ([*NOT_WIDENED, "--port", "1"], "sets --port itself"),
        ([*NOT_WIDENED, "--", "--max-num-seqs=4"], "--max-num-seqs after --: write it before"),
        ([*NOT_WIDENED, "--", "--enable-prefix-caching"], "the benchmark measures without"),
        ([*SET, "spec_bench"], "vLLM cannot read spec_bench from None"),
        ([*SET, "hf", "--chat-template-kwargs", "{}"], "no effect with --dataset-name hf"),
        ([*SET, "custom", "--prompts", "a", "--quick"], "--prompts, --quick would have no effect"),
        (["--quick", "--rounds", "1", "--concurrency", "1"], "no effect beside --rounds"),
        ([*BREAK_EVEN, "--drafter", "a"], "--drafter would have no effect with --break-even"),
        ([*BREAK_EVEN, "--beside", "ngram", "--ignore-eos"], "--beside, --ignore-eos would have"),
        ([*BREAK_EVEN, "--native-k"], "--native-k would have no effect"),
        ([*TARGET, "stray", "--break-even"], "stray would have no effect"),
        ([*BREAK_EVEN, "--temperature", "0"], "--temperature would have no effect"),
        ([*BREAK_EVEN, "--dataset-name", "custom"], "--dataset-name would have no effect"),
        ([*BREAK_EVEN, "--concurrency", "65"], "raise --max-num-seqs"),
        ([*BREAK_EVEN, "--output-len", "1"], "raise --output-len"),
        ([*TARGET, "--context", "64"], "--context would have no effect without --break-even"),
        ([*BESIDE, "both"], "none of blocks"),
        ([*BESIDE, '{"temperature": 1}'], "not options of ours"),
        # Servers and results are found by name: one of them would never end.
        (
            [*BESIDE, '{"draft_window": 64}', '{"draft_window": "64"}'],
            "'ours, draft_window 64' 2 times: leave all but one out",
        ),
        # Before anything is prepared.
        (
            [*TARGET, "--drafter", "nowhere", "--wrong", "1"],
            "vllm bench serve: error: unrecognized arguments: --wrong 1",
        ),
    ],
)
def test_refused_with_the_remedy(
    tmp_path: Path,
    comparisons: list[Comparison],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert bench(tmp_path, *arguments) == COULD_NOT_RUN
    assert message in capsys.readouterr().err
    assert not comparisons


@pytest.mark.parametrize(
    ("arguments", "missing"), [(NOT_WIDENED, "pandas, matplotlib"), (BREAK_EVEN, "pandas")]
)
def test_a_missing_library_is_named_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    missing: str,
) -> None:
    monkeypatch.setattr(bench_command, "find_spec", lambda name: None)
    assert bench(tmp_path, *arguments) == COULD_NOT_RUN
    said = capsys.readouterr().err
    assert f": {missing} missing: pip install {missing.replace(',', '')}" in said


def test_an_interrupted_bench_says_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is interrupted in its second round."""

    def run(self: Comparison) -> None:
        result = {"output_throughput": 7, "preemptions": 1}
        about = {"round": 0, "load": "held_out", "setting": 1, "result": result}
        self.record.finish_round([about | {"side": side.name} for side in self.record.sides])
        raise KeyboardInterrupt

    monkeypatch.setattr(Comparison, "run", run)
    assert bench(tmp_path, *NOT_WIDENED, "--native-k", "3") == INTERRUPTED
    printed = capsys.readouterr().out
    assert "held_out: tokens/s, median of rounds" in printed
    assert "(plain at 1, native K=3 at 1, ours at 1), so some may have waited" in printed
    assert "1 of 5 rounds are complete." in printed
    assert "Written" not in printed


def test_sides_and_defaults(
    tmp_path: Path, comparisons: list[Comparison], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--native-k", "9", "7", "3", "--", "--tensor-parallel-size", "2"]
    assert bench(tmp_path, *NOT_WIDENED, *asked) == 0
    assert "native K above 7 is left out" in capsys.readouterr().err
    (comparison,) = comparisons
    names = [side.name for side in comparison.record.sides]
    assert names == ["plain", "native K=3", "native K=7", "ours"]
    plain, native, _, ours = comparison.record.sides
    assert plain.speculative_config is None
    assert (plain.plugins, native.plugins, ours.plugins) == ("", "", "dflash")
    of_ours = {"method": "dflash", "model": str(DEMO / "drafter"), "require": True}
    assert ours.speculative_config == of_ours
    assert [cell.concurrency for cell in comparison.cells] == [1, 2, 4, 8, 16, 32]
    numbers = [cell.flags[cell.flags.index("--num-prompts") + 1] for cell in comparison.cells]
    assert numbers == ["4", "6", "12", "24", "48", "96"]
    assert comparison.record.rounds == 5
    flags = " ".join(comparison.flags)
    assert "--no-enable-prefix-caching" in flags
    assert "--tensor-parallel-size 2" in flags


def test_prompts_reach_vllm_as_they_are(tmp_path: Path, comparisons: list[Comparison]) -> None:
    """Also plain text; each file at each temperature."""
    files = [tmp_path / name for name in ("code.txt", "chat.jsonl")]
    files[0].write_text("def f():\n\nimport os\n")
    files[1].write_text(json.dumps({"prompt": "Hi\nthere"}))
    asked = ["--prompts", *map(str, files), "--temperature", "0", "0.7", "--concurrency", "2"]
    assert bench(tmp_path, *NOT_WIDENED, *asked, "--ignore-eos", "--output_len", "5") == 0
    cells = comparisons[0].cells
    loads = ["code", "code, temperature 0.7", "chat", "chat, temperature 0.7"]
    assert [cell.load for cell in cells] == loads
    flags = list(cells[1].flags)
    path = Path(flags[flags.index("--dataset-path") + 1])
    prompts = [json.loads(line) for line in path.read_text().splitlines()]
    assert prompts == [{"prompt": "def f():"}, {"prompt": "import os"}]
    assert {"--skip-chat-template", "--ignore-eos"} < {*flags}
    assert flags[flags.index("--temperature") + 1] == "0.7"
    assert flags[flags.index("--output-len") + 1] == "5"


def test_a_set_of_vllms(tmp_path: Path, comparisons: list[Comparison]) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"prompt": "Name three kinds of bread."}))
    thinking = ["--chat-template-kwargs", '{"enable_thinking": false}']
    asked = ["--dataset-name", "custom", "--dataset-path", str(file), *thinking]
    assert bench(tmp_path, *NOT_WIDENED, *asked, "--", "--served_model_name=it", "other") == 0
    (comparison,) = comparisons
    assert comparison.record.rounds == 2
    loads = [(cell.load, cell.concurrency) for cell in comparison.cells]
    assert loads == [("custom", 1), ("custom", 8)]
    flags = " ".join(comparison.cells[0].flags)
    assert flags.startswith("--dataset-name custom --model")
    assert f"--served-model-name it --dataset-path {file} {' '.join(thinking)}" in flags
    assert "--num-prompts 80" in flags
    assert "--output-len" not in flags


def test_flags_of_servers_that_their_client_needs() -> None:
    flags = ["--trust-remote-code", "--tokenizer_mode=hf", "--dtype", "half", "--tokenizer", "a_b"]
    found = ["--trust-remote-code", "--tokenizer", "a_b", "--tokenizer-mode", "hf"]
    assert client_flags([*flags, "--served-model-name", "c", "d"]) == [
        *found,
        *("--served-model-name", "c"),
    ]
    assert client_flags(["--dtype", "half"]) == []


def test_other_options_of_ours_are_sides(tmp_path: Path, comparisons: list[Comparison]) -> None:
    asked = ["blocks", '{"draft_window": 64, "free_drafts": "off", "require": false}', "ngram"]
    assert bench(tmp_path, *BESIDE, *asked) == 0
    *_, blocks, alone, ngram = comparisons[0].record.sides
    assert blocks.name == "ours, blocks only"
    assert alone.name == "ours, draft_window 64, free_drafts off, require False"
    assert blocks.speculative_config is not None
    assert alone.speculative_config is not None
    assert alone.speculative_config["draft_window"] == 64
    assert blocks.speculative_config["require"] is True
    assert alone.speculative_config["require"] is False
    assert (blocks.plugins, alone.plugins, ngram.plugins) == ("dflash", "dflash", "")


def test_vllms_own_is_left_out_where_it_does_not_run_the_drafter(
    tmp_path: Path, comparisons: list[Comparison]
) -> None:
    pair = ["--target", str(DEMO / "target"), "--drafter", str(DEMO / "drafter2")]
    assert bench(tmp_path, *pair) == 0
    (comparison,) = comparisons
    assert [side.name for side in comparison.record.sides] == ["plain", "ours"]


@pytest.mark.parametrize(("is_cuda", "each"), [(True, str(0.8 / 3)), (False, None)])
def test_servers_share_a_gpus_memory(
    tmp_path: Path,
    comparisons: list[Comparison],
    monkeypatch: pytest.MonkeyPatch,
    is_cuda: bool,
    each: str | None,
) -> None:
    """Plain, vLLM's own at K = 3, and ours live side by side.

    They start one after the other, since vLLM measures the memory that is free.
    """
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(6))
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: is_cuda)
    arguments = [*NOT_WIDENED, "--native-k", "3", "--gpu-memory-utilization", "0.8"]
    assert bench(tmp_path, *arguments) == 0
    assert bench(tmp_path, *arguments, "--", "--kv-cache-memory-bytes", "1000") == 0
    flags = comparisons[0].flags
    found = flags[flags.index("--gpu-memory-utilization") + 1] if is_cuda else None
    assert found == each
    assert [one.at_once for one in comparisons] == [1 if is_cuda else 6, 6]
