"""The GPU kit's plan and its parts: running them, ending them, keeping their results."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from gpu import gpu_command, gpu_machine, gpu_models, gpu_run
from gpu.gpu_plan import RESULT, Part, chosen, plan
from gpu.gpu_run import (
    FAILED,
    PASSED,
    SKIPPED,
    UNFINISHED,
    kept,
    read_outcomes,
    run,
)
from gpu.gpu_sizes import ADAPTIVE, SIZES, TINY, Size, side_of
from support import DEMO
from support.waiting import wait_until
from vllm_dflash.tools.bench.widen import widen

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


def test_models_are_made_in_memory_where_that_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = tmp_path / "shm", tmp_path / "out"
    monkeypatch.setattr(gpu_models, "IN_MEMORY", memory)
    assert gpu_models.models_folder(TINY, disk) == disk / "tiny"  # no such folder yet
    memory.mkdir()
    folder = gpu_models.models_folder(TINY, disk)
    assert folder.is_relative_to(memory)
    free = int(1.2 * SIZES[-1].bytes_of_weights)
    monkeypatch.setattr(gpu_models, "free_bytes", lambda: free)
    assert gpu_models.models_folder(SIZES[-1], disk) == disk / "8B"
    assert gpu_models.models_folder(SIZES[0], disk).parent == folder.parent
    (folder.parent / "8B").mkdir(parents=True)  # made before: takes up the room itself
    assert gpu_models.models_folder(SIZES[-1], disk) == folder.parent / "8B"
    gpu_models.forget_models()
    assert [*memory.iterdir()] == []


@pytest.mark.parametrize(
    ("size", "layer", "drafter"), [(SIZES[0], 50.3e6, 0.25e9), (SIZES[-1], 192.9e6, 0.95e9)]
)
def test_sizes_are_those_of_their_names(size: Size, layer: float, drafter: float) -> None:
    """Widen tensors without data: one that cannot be widened raises."""
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
    """Even if it ignores interrupts and its engine has a session of its own."""
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
    """Results are in the file of outcomes even if the machine is taken away."""
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
