"""The GPU kit's plan, and its parts: running, ending, keeping them."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from gpu import gpu_command, gpu_machine, gpu_measure, gpu_models, gpu_plan, gpu_run
from gpu.gpu_machine import NO_GPU, kind_of, together
from gpu.gpu_plan import RESULT, Part, chosen, environment, plan, plan_dry_run
from gpu.gpu_run import (
    FAILED,
    PASSED,
    REFUSED,
    SKIPPED,
    UNFINISHED,
    judge,
    kept,
    read_outcomes,
    run,
)
from gpu.gpu_sizes import ADAPTIVE, SIZES, TINY, Load, Size, side_of
from support import DEMO
from support.waiting import wait_until
from vllm_dflash.tools.bench.widen import widen
from vllm_dflash.tools.engine_process import EngineDied

MACHINE = {"name": "some GPU", "sources": "1"}


def python(name: str, code: str, *arguments: str, seconds: float = 60.0) -> Part:
    return Part(name, seconds, (sys.executable, "-c", code, *arguments))


def test_no_part_takes_more_than_eight_minutes() -> None:
    parts = plan(80.0)
    assert all(part.seconds <= part.limit <= 480 for part in parts)
    names = ["kernels", "text eager FLASH_ATTN", "text graphs TRITON_ATTN", "graphs", "load"]
    names += ["parity bfloat16", "1.7B plain", "8B ours", "soak FLASH_ATTN"]
    names += ["trees eager TRITON_ATTN", "trees graphs FLASH_ATTN"]
    assert {*names} < {part.name for part in parts}
    assert len({part.slug for part in parts}) == len(parts)
    dry = {part.name.split()[0] for part in plan_dry_run(DEMO / "held_out.jsonl")}
    assert dry == {"kernels", "text", "trees", "load", "parity", "soak", "tiny"}


def test_trees_are_told_from_chains() -> None:
    """Both engines of a part are started as its name says."""
    for part in plan(80.0) + plan_dry_run(DEMO / "held_out.jsonl"):
        assert ("--tree" in part.command) == (part.group == "trees")
    modes = {part.name.split()[1] for part in chosen(plan(80.0), ["trees"])}
    assert modes == {"eager", "graphs"}


@pytest.mark.parametrize(
    ("group", "minutes"), [("first", 5), ("second", 8), ("third", 8.5), ("trees", 8)]
)
def test_groups_fit_into_a_slice_of_time(group: str, minutes: float) -> None:
    parts = plan(80.0)
    assert sum(part.seconds for part in chosen(parts, [group])) <= 60 * minutes


def test_parts_are_asked_for_by_name_or_group_in_the_order_of_the_plan() -> None:
    parts = plan(80.0)
    asked = ["8B ours", "second", "parity-float32", "1.7B-native-K7", "kernels"]
    assert [part.name for part in chosen(parts, asked)] == [
        *("kernels", "1.7B plain", "1.7B native K=7", "1.7B native adaptive", "1.7B ours"),
        *("parity float32", "8B ours"),
    ]
    assert chosen(parts, []) == parts
    assert {part.group for part in chosen(parts, ["1.7B"])} == {"1.7B"}


@pytest.mark.parametrize(
    ("asked", "nearest"), [("frist", "first"), ("8B our", "8B ours"), ("kernel", "kernels")]
)
def test_an_unknown_part_is_refused_with_the_nearest(
    asked: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_command.main(["--part", "first", "--part", asked]) == gpu_command.LACKING
    said = capsys.readouterr().err
    assert said == f"no part is called {asked!r}; the nearest is {nearest!r}\n"


def test_parts_are_listed_where_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_command.main(["--list", "--part", "soak"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["soak", "soak", "FLASH_ATTN", "390", "480"] in lines


def test_flashinfers_sampler_is_off_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    monkeypatch.setattr(gpu_plan, "find_spec", lambda name: None)
    assert environment(is_dry=False)["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    monkeypatch.setattr(gpu_plan, "find_spec", lambda name: name)
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in environment(is_dry=False)


def test_models_are_made_in_memory_where_that_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = tmp_path / "shm", tmp_path / "out"
    monkeypatch.setattr(gpu_models, "IN_MEMORY", memory)
    assert gpu_models.models_folder(TINY, disk) == disk / "tiny"  # there is none
    memory.mkdir()
    folder = gpu_models.models_folder(TINY, disk)
    assert folder.is_relative_to(memory)
    free = int(1.2 * SIZES[-1].bytes_of_weights)
    monkeypatch.setattr(gpu_models, "free_bytes", lambda: free)
    assert gpu_models.models_folder(SIZES[-1], disk) == disk / "8B"
    assert gpu_models.models_folder(SIZES[0], disk).parent == folder.parent
    (folder.parent / "8B").mkdir(parents=True)  # made before, and now in the way of itself
    assert gpu_models.models_folder(SIZES[-1], disk) == folder.parent / "8B"
    gpu_models.forget_models()
    assert [*memory.iterdir()] == []


@pytest.mark.parametrize(
    ("size", "layer", "drafter"), [(SIZES[0], 50.3e6, 0.25e9), (SIZES[-1], 192.9e6, 0.95e9)]
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
    _, small, large = SIZES
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
        "WARNING 11-22 [j.py:1] Triton kernel JIT compilation during inference: _walk. This ...\n"
    )
    assert gpu_measure.telling_lines(log) == [
        "vllm-dflash 1.0 is active: drafter d",
        "Using FLASH_ATTN attention backend out of ['FLASH_ATTN'].",
        "draft lengths 0, 7 (whole)",
        "KV cache size: 1,000 tokens",
        "Graph capturing finished in 5 secs, took 0.30 GiB",
        "Triton kernel JIT compilation during inference: _walk. This ...",
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
    assert gpu_measure.measure(SIZES[-1], "plain", 60.0, 8.0, file) == 0
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
    found = run(python("stuck", ENGINE, RESULT, seconds=2.0), tmp_path, MACHINE, {})
    assert found.outcome == FAILED
    assert re.match(r"ended after \d+ s, its limit", found.words)
    wait_until(lambda: not psutil.pid_exists(found.data["pid"]), "its engine's end", 30.0)


def test_what_did_not_fail_is_kept(tmp_path: Path) -> None:
    good = python("good", 'print(\'{"verdict": "fine"}\')', "--json")
    bad = python("bad", "1 / 0")
    assert kept(good, tmp_path, MACHINE) is None
    found = run(good, tmp_path, MACHINE, {})
    run(bad, tmp_path, MACHINE, {})
    assert kept(good, tmp_path, MACHINE) == found
    assert kept(bad, tmp_path, MACHINE) is None
    assert kept(good, tmp_path, MACHINE | {"sources": "2"}) is None
    assert kept(good, tmp_path, MACHINE | {"driver_version": "2"}) == found
    assert kept(python("good", "print(2)"), tmp_path, MACHINE) is None
    assert [one.part for one in read_outcomes(tmp_path)] == ["good", "bad"]


def test_the_same_part_where_repository_and_python_lie_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = ("-c", 'print(\'{"verdict": "fine"}\')')
    here = Part("good", 60.0, (sys.executable, *code, f"{gpu_machine.ROOT}/a", "--json"))
    found = run(here, tmp_path, MACHINE, {})
    assert found.command == ["python", *code, "./a", "--json"]
    monkeypatch.setattr(gpu_run, "ROOT", Path("/there"))
    monkeypatch.setattr("sys.executable", "/there/python")
    there = Part("good", 60.0, ("/there/python", *code, "/there/a", "--json"))
    assert kept(there, tmp_path, MACHINE) == found


def test_a_part_whose_packages_are_absent_is_skipped(tmp_path: Path) -> None:
    part = Part("tests", 60.0, (sys.executable, "-c", "1 / 0"), needs=("pytest", "not-there"))
    found = run(part, tmp_path, MACHINE, {})
    assert (found.outcome, found.words) == (SKIPPED, "no not-there")
    assert kept(part, tmp_path, MACHINE) is None


def test_what_is_found_is_kept_while_a_part_runs(tmp_path: Path) -> None:
    """Whoever takes the machine away, what was written lies in the file of outcomes."""
    part = python("slow", WRITES_AND_WAITS, RESULT, str(tmp_path / "go"))
    seen: list[Any] = []

    def tell(done: float, doing: str = "") -> None:
        if now := [one for one in read_outcomes(tmp_path) if one.data]:
            seen.extend(now)
            (tmp_path / "go").touch()

    assert run(part, tmp_path, MACHINE, {}, tell).outcome == PASSED
    assert (seen[0].outcome, seen[0].data) == (UNFINISHED, {"verdict": "half"})


WRITES_AND_WAITS = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text('{"verdict": "half"}')
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.05)
"""


def test_machines_of_a_kind() -> None:
    one = MACHINE | {"driver_version": "1", "torch": "2"}
    assert kind_of(one) == MACHINE | {"torch": "2"}
    both = together([one, one | {"driver_version": "2"}])
    assert both == one | {"driver_version": "1, 2"}


def test_the_digest_is_that_of_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_machine, "ROOT", tmp_path)
    digests = [gpu_machine.describe_machine()["sources"]]
    for name, text in {
        "vllm_dflash/engine/a.py": "1",
        "benchmarks/gpu/b.py": "1",
        "tests/engine/test_cuda_c.py": "1",
        "benchmarks/gpu/d.py": "1",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        digests.append(gpu_machine.describe_machine()["sources"])
    (tmp_path / "benchmarks/gpu/d.py").rename(tmp_path / "benchmarks/gpu/e.py")
    digests.append(gpu_machine.describe_machine()["sources"])
    (tmp_path / "benchmarks/gpu/e.py").write_text("2")
    digests.append(gpu_machine.describe_machine()["sources"])
    assert len({*digests}) == len(digests)
    (tmp_path / "README.md").write_text("2")
    assert gpu_machine.describe_machine()["sources"] == digests[-1]


@pytest.mark.usefixtures("sigterm_ignored")
def test_a_time_limit_ends_the_kit_as_ctrl_c_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts are in sessions of their own, and would go on."""
    monkeypatch.setattr(gpu_command, "run_all", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit, match="143"):
        gpu_command.main(["--dry-run", "--out", str(tmp_path)])


def test_what_is_lacking_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_machine, "_output", lambda command: "")
    assert gpu_command.main([]) == gpu_command.LACKING
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("make gpu needs a GPU with NVIDIA's driver, vLLM's CUDA build")
    assert "--dry-run" in said[0]
    monkeypatch.setattr(gpu_machine, "version_of", lambda package: "")
    assert "vllm-dflash installed (" in (gpu_machine.lacking({"name": NO_GPU}) or "")


def test_a_complete_machine_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what is optional for vLLM is there, no plots, no tests, no repository."""
    versions = {"vllm": "0.32.0", "vllm-dflash": "1"}
    monkeypatch.setattr(gpu_machine, "version_of", lambda package: versions.get(package, ""))
    said = {"nvidia-smi": "NVIDIA H100, 575.1, 81559, 9.0, 700.00"}
    monkeypatch.setattr(gpu_machine, "_output", lambda command: said[command[0]])
    machine = gpu_machine.describe_machine()
    assert (machine["memory.total"], machine["driver_version"]) == ("81559", "575.1")
    assert gpu_machine.lacking(machine) is None
