"""The GPU kit's plan and its parts: running them, ending them, keeping their results."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import psutil
import pytest

from gpu import gpu_plan, gpu_run
from gpu.gpu_benches import BENCHES, TINY, Bench
from gpu.gpu_plan import RESULT, Part, plan
from gpu.gpu_run import FAILED, kept, read_outcomes, run
from support.waiting import wait_until
from vllm_dflash.tools.bench.bench_command import add_bench, settle
from vllm_dflash.tools.bench.bench_runs import parse_client_flags
from vllm_dflash.tools.bench.bench_setup import check_concurrency

BENCHMARKS = Path(gpu_plan.__file__).parents[1]
MACHINE = {"name": "some GPU", "sources": "1"}


def python(name: str, code: str, *arguments: str, seconds: float = 60.0) -> Part:
    return Part(name, seconds, (sys.executable, "-c", code, *arguments))


def test_no_part_takes_more_than_eight_minutes() -> None:
    parts = plan()
    assert all(part.seconds <= part.limit <= 480 for part in parts)
    names = ["kernels", "text eager FLASH_ATTN", "text graphs TRITON_ATTN", "graphs", "load"]
    names += ["parity bfloat16", "1.7B", "8B", "8B trees", "8B, 8k"]
    names += ["trees eager TRITON_ATTN", "trees graphs FLASH_ATTN", "soak FLASH_ATTN"]
    names += ["planned text eager FLASH_ATTN", "adaptive text graphs FLASH_ATTN", "synchronous"]
    assert {*names} < {part.name for part in parts}
    assert len({part.slug for part in parts}) == len(parts)


def test_what_a_lease_can_answer_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """45 minutes: texts, speed, drafters and what is sound. The rest may wait.

    A second target, if somebody made it there, is 6 minutes more."""
    for name in ("SMOLLM2", "GEMMA"):
        monkeypatch.setattr(gpu_plan, name, tmp_path / name)
    assert "drafters" not in {part.group for part in plan()}
    (tmp_path / "SMOLLM2/target").mkdir(parents=True)
    parts = plan()
    groups = [part.group for part in parts]
    assert list(dict.fromkeys(groups)) == ["texts", "speed", "drafters", "sound", "rest"]
    assert groups == sorted(groups, key=["texts", "speed", "drafters", "sound", "rest"].index)
    minutes = sum(part.seconds for part in parts if part.group != "rest") / 60
    assert 40 < minutes < 50
    (tmp_path / "GEMMA/target").mkdir(parents=True)
    drafters = [part for part in plan() if part.group == "drafters"]
    steps = ("answers", "train", "export")
    assert [part.name for part in drafters] == [
        f"{target} {step}" for target in ("SmolLM2", "Gemma 3 270M") for step in steps
    ]
    assert 5 < sum(part.seconds for part in drafters[3:]) / 60 < 7


@pytest.mark.parametrize("bench", [*BENCHES, TINY], ids=lambda bench: bench.name)
def test_benches_have_flags_that_bench_takes(bench: Bench) -> None:
    """Without a GPU nothing else would show it."""
    parser = argparse.ArgumentParser()
    add_bench(parser.add_subparsers())
    parsed, unknown = parser.parse_known_args(["bench", *bench.flags])
    parsed.flags, parsed.client_flags = [*bench.serve], unknown
    settle(parsed)
    check_concurrency(parsed)
    parse_client_flags([*unknown, "--model", "target"])
    least = parsed.max_model_len * max(parsed.concurrency)  # tokens that may be in flight
    if bench.size is not None and bench is not TINY:
        target, drafter = bench.size.target, bench.size.drafter
        numbers = 2 * 64 * sum(one.kv_heads * one.layers for one in (target, drafter))
        cache = int(bench.serve[bench.serve.index("--kv-cache-memory-bytes") + 1])
        assert 2 * numbers * least * 0.75 < cache  # answers do not fill `max_model_len`
        sides = 2 + len(parsed.native_k) + len(parsed.beside)
        assert sides * (cache + 1.1 * bench.size.bytes_of_weights) < 135 << 30


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
