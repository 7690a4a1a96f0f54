"""The GPU kit's plan, and its parts: running, ending, keeping them."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from gpu import gpu_command, gpu_machine, gpu_measure, gpu_run
from gpu.gpu_machine import NO_GPU
from gpu.gpu_plan import LIMIT, RESULT, Part, plan, plan_dry_run
from gpu.gpu_run import FAILED, PASSED, REFUSED, SKIPPED, judge, kept, run
from gpu.gpu_sizes import ADAPTIVE, SIZES, TINY, Load, Size, side_of
from support import DEMO
from support.waiting import wait_until
from vllm_dflash.tools.bench.widen import widen
from vllm_dflash.tools.engine_process import EngineDied

MACHINE = {"name": "some GPU", "commit": "1"}


def python(name: str, code: str, *arguments: str, seconds: float = 60.0) -> Part:
    return Part(name, seconds, (sys.executable, "-c", code, *arguments))


def test_everything_is_over_in_40_minutes() -> None:
    parts = plan(80.0)
    assert sum(LIMIT * part.seconds for part in parts) <= 40 * 60
    names = ["tests", "verify", "parity float32", "parity bfloat16", "1.7B plain", "8B ours"]
    assert {*names} < {part.name for part in parts}
    assert len({part.slug for part in parts}) == len(parts)
    dry = {part.name.split()[0] for part in plan_dry_run(DEMO / "held_out.jsonl")}
    assert dry == {"tests", "verify", "parity", "tiny"}


@pytest.mark.parametrize(
    ("size", "layer", "drafter"), zip(SIZES, (50.3e6, 192.9e6), (0.25e9, 0.95e9), strict=True)
)
def test_sizes_are_those_of_their_names(size: Size, layer: float, drafter: float) -> None:
    """By widening tensors without numbers: what cannot be widened raises."""
    for name, shape, expected in (
        ("target", size.target, layer * size.target.layers),
        ("drafter", size.drafter, drafter),
    ):
        config = json.loads((DEMO / name / "config.json").read_text())
        weights = load_file(DEMO / name / "model.safetensors")
        wide = widen({key: one.to("meta") for key, one in weights.items()}, config, shape)
        layers = [one.numel() for key, one in wide.items() if "embed_tokens" not in key]
        assert sum(layers) == pytest.approx(expected, rel=0.06), name


def test_what_fits_a_gpu() -> None:
    small, large = SIZES
    for size in SIZES:
        for load in size.loads:
            assert all(size.fits(load, count, 80.0) for count in load.concurrency)
    first = large.loads[0]
    assert not large.fits(first, 1, 16.0)
    assert large.fits(first, 1, 24.0)
    assert not large.fits(first, 256, 32.0)
    assert small.fits(small.loads[-1], 1, 16.0)


def test_every_side_there_is() -> None:
    for size in (*SIZES, TINY):
        for name in size.sides:
            assert side_of(name, "drafter").name == name
    config = side_of(ADAPTIVE, "drafter").speculative_config or {}
    assert config["enable_adaptive_verification"]
    assert config["num_speculative_tokens"] == 7


def test_prompts_are_as_long_as_asked_for_and_differ() -> None:
    held_out = [[10 * number + i for i in range(3)] for number in range(5)]
    long = prompts = gpu_measure.prompts_for(Load("", 40, 1, ()), held_out, 5)
    assert {len(prompt) for prompt in long} == {40}
    assert len({tuple(prompt[:3]) for prompt in prompts}) == 5
    assert prompts[1][:4] == [10, 11, 12, 20]
    assert gpu_measure.prompts_for(Load("", None, 1, ()), held_out, 2) is held_out


def test_telling_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "(EngineCore pid=7) INFO 11-22 08:44:05 [log.py:30] vllm-dflash 1.0 is active: drafter d\n"
        "INFO 11-22 [cuda.py:507] Using FLASH_ATTN attention backend out of ['FLASH_ATTN'].\n"
        "INFO 11-22 [x.py:1] draft lengths 0, 7 (whole)\n"
        "INFO 11-22 [x.py:1] draft lengths 0, 7 (whole)\n"
        "INFO something else\n"
        "INFO 11-22 [x.py:1] GPU KV cache size: 1,000 tokens\n"
        "INFO 11-22 [m.py:1] Graph capturing finished in 5 secs, took 0.30 GiB\n"
    )
    assert gpu_measure.telling_lines(log) == [
        "vllm-dflash 1.0 is active: drafter d",
        "Using FLASH_ATTN attention backend out of ['FLASH_ATTN'].",
        "draft lengths 0, 7 (whole)",
        "KV cache size: 1,000 tokens",
        "Graph capturing finished in 5 secs, took 0.30 GiB",
    ]


class Answering:
    """An engine in name only."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, float]] = []

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[1, 2]] * len(texts)

    def closed(self, **load: Any) -> dict[str, Any]:
        self.asked.append((load["concurrency"], load["seconds"]))
        time.sleep(0.05)
        return {"number": len(self.asked)}


def test_the_first_window_does_not_count() -> None:
    engine: Any = Answering()
    settings = [(TINY.loads[0], 1), (TINY.loads[0], 2)]
    ((_, results), (setting, _)) = gpu_measure.measure_all(
        engine, SIZES[0], settings, time.monotonic() + 60
    )
    assert engine.asked == [(1, 1.5), (1, 2.5), (1, 2.5), (2, 1.5), (2, 2.5), (2, 2.5)]
    assert results == [{"number": 2}, {"number": 3}]
    assert setting == settings[1]


def test_what_there_is_no_time_for_is_left_out() -> None:
    """The second one could begin before the deadline, but takes as long as the first."""
    engine: Any = Answering()
    settings = [(TINY.loads[0], count) for count in (1, 2)]
    deadline = time.monotonic() + 0.25
    assert len([*gpu_measure.measure_all(engine, SIZES[0], settings, deadline)]) == 1


@pytest.mark.parametrize(
    ("side", "words", "code"),
    [
        (ADAPTIVE, "ValueError: Adaptive verification replays decode cudagraphs", 0),
        (ADAPTIVE, "OutOfMemoryError", 1),
        ("native K=7", "ValueError: Adaptive verification", 1),
    ],
)
def test_only_a_refusal_of_adaptive_verification_is_none_of_our_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str, words: str, code: int
) -> None:
    log = tmp_path / "engine.log"
    log.write_text(words)

    def die(*arguments: Any, **named: Any) -> None:
        raise EngineDied(log)

    monkeypatch.setattr(gpu_measure, "EngineProcess", die)
    (tmp_path / "json").mkdir()
    file = tmp_path / "json" / "one.json"
    assert gpu_measure.measure(TINY, side, 60.0, 80.0, file) == code
    data = json.loads(file.read_text())
    assert judge(code, ["died"], data)[0] == (FAILED if code else REFUSED)
    assert ("refused" in data) == (code == 0)


def test_an_engine_without_memory_for_any_load_is_not_started(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    assert gpu_measure.measure(SIZES[1], "plain", 60.0, 8.0, file) == 0
    assert judge(0, [], json.loads(file.read_text())) == (PASSED, "no memory for any load")


def test_judging() -> None:
    assert judge(0, ["SKIPPED [7] a.py: needs a GPU", "==== 7 skipped in 3s ===="], {}) == (
        SKIPPED,
        "7 skipped in 3s: needs a GPU",
    )
    assert judge(0, ["= 6 passed, 1 skipped in 3s ="], {}) == (PASSED, "6 passed, 1 skipped in 3s")
    assert judge(1, ["x", "= 1 failed, 1 passed in 3s ="], {})[0] == FAILED
    assert judge(0, ["..."], {"verdict": "lossless"}) == (PASSED, "lossless")
    assert judge(1, ["..."], {"verdict": "regression"}) == (FAILED, "regression")
    assert judge(2, [], {}) == (FAILED, "no word")


def test_results_come_from_a_file_or_from_what_is_printed(tmp_path: Path) -> None:
    prints = python("prints", 'print(\'{"verdict": "fine"}\')', "--json")
    writes = python("writes", "import sys; open(sys.argv[1], 'w').write('{\"a\": 1}')", RESULT)
    assert run(prints, tmp_path, MACHINE, {}).data == {"verdict": "fine"}
    assert run(writes, tmp_path, MACHINE, {}).data == {"a": 1}


def test_the_end_of_a_failing_log_is_kept(tmp_path: Path) -> None:
    part = python("bad", "import sys; print('why', flush=True); sys.exit('because')")
    found = run(part, tmp_path, MACHINE, {})
    assert (found.outcome, found.words) == (FAILED, "because")
    assert found.tail == ["why", "because"]


ENGINE = """
import subprocess, sys, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
code = "import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
open(sys.argv[1], "w").write('{"pid": %d}' % child.pid)
time.sleep(600)
"""


def test_a_part_that_takes_too_long_is_ended_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it does not listen, and its engine has a session of its own."""
    monkeypatch.setattr(gpu_run, "SECONDS_TO_END", 0.5)
    found = run(python("stuck", ENGINE, RESULT, seconds=4.0), tmp_path, MACHINE, {})
    assert found.outcome == FAILED
    assert re.match(r"ended after \d+ s, its limit", found.words)
    wait_until(lambda: not psutil.pid_exists(found.data["pid"]), "its engine's end", 30.0)


def test_what_did_not_fail_is_kept(tmp_path: Path) -> None:
    good, bad = python("good", "print('{}')", "--json"), python("bad", "1 / 0")
    assert kept(good, tmp_path, MACHINE) is None
    found = run(good, tmp_path, MACHINE, {})
    run(bad, tmp_path, MACHINE, {})
    assert kept(good, tmp_path, MACHINE) == found
    assert kept(bad, tmp_path, MACHINE) is None
    assert kept(good, tmp_path, MACHINE | {"commit": "2"}) is None
    assert kept(python("good", "print(2)"), tmp_path, MACHINE) is None


def test_what_is_lacking_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_machine, "_output", lambda command: "")
    assert gpu_command.main([]) == gpu_command.LACKING
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("make gpu needs a GPU with NVIDIA's driver, vLLM's CUDA build")
    assert "--dry-run" in said[0]
    monkeypatch.setattr(gpu_machine, "_version", lambda package: "")
    assert "pytest, hypothesis, matplotlib (" in (gpu_machine.lacking({"name": NO_GPU}) or "")


def test_a_complete_machine_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = dict.fromkeys(gpu_machine.FOR_THE_KIT, "1") | {"vllm": "0.33.0"}
    monkeypatch.setattr(gpu_machine, "_version", lambda package: versions.get(package, ""))
    said = {"nvidia-smi": "NVIDIA H100, 575.1, 81559, 9.0, 700.00", "git": "abc"}
    monkeypatch.setattr(gpu_machine, "_output", lambda command: said[command[0]])
    machine = gpu_machine.describe_machine()
    assert (machine["memory.total"], machine["commit"]) == ("81559", "abc")
    assert gpu_machine.lacking(machine) is None
