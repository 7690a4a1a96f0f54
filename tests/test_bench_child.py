"""A child with a real engine: what the loads get from it, and how its death is reported."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_dflash.bench.engine_child import BenchChild
from vllm_dflash.bench.prompts import read_prompts
from vllm_dflash.engine_child import EngineDied

DEMO = Path(__file__).parent.parent / "models" / "demo"
PROMPTS = read_prompts(DEMO / "held_out.jsonl", 8)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BenchChild]:
    log = Path(tmp_path_factory.mktemp("child")) / "child.log"
    arguments = {"model": str(DEMO / "target"), "max_model_len": 512, "enforce_eager": True}
    arguments["disable_log_stats"] = False  # for `generate`
    with BenchChild(log, plugins="", **arguments) as child:
        yield child


def test_closed(child: BenchChild) -> None:
    result = child.ask("closed", prompts=PROMPTS, concurrency=3, tokens=8, seconds=0.3)
    assert result["tokens"] > 20
    assert result["tokens_per_output"] == 1  # nothing drafts
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / result["seconds"])


def test_loads_leave_nothing_behind(child: BenchChild) -> None:
    for _ in range(2):
        result = child.ask("swing", prompts=PROMPTS, phases=[(4, 40), (1, 10)], tokens=16)
        assert len(result["seconds"]) == 2
        result = child.ask("poisson", prompts=PROMPTS, arrivals=[0.0, 0.1], tokens=4)
        assert all(
            0 < first < last
            for first, last in zip(result["to_first_token"], result["to_last_token"], strict=True)
        )


def test_generate(child: BenchChild) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    answer = child.ask("generate", prompts=PROMPTS[:3], sampling=sampling)
    assert [len(ids) for ids in answer["token_ids"]] == [6, 6, 6]


def test_death_is_reported_with_the_log(tmp_path: Path) -> None:
    log = tmp_path / "dead.log"
    with BenchChild(log, model=str(tmp_path / "nothing")) as child:
        with pytest.raises(EngineDied) as death:
            child.ask("versions")
        with pytest.raises(EngineDied):
            child.ask("versions")
    message = str(death.value)
    assert str(log) in message
    assert log.read_text().splitlines()[-1] in message
    assert "nothing" in message


def all_gone(group: int) -> bool:
    """Whether a group of processes ends and is reaped, also where init waits for a core."""
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Processes that a shell starts in the background ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_interrupting_a_wait_ends_the_child(tmp_path: Path) -> None:
    threading.Timer(4, os.kill, (os.getpid(), signal.SIGINT)).start()
    with BenchChild(tmp_path / "log", model=str(DEMO / "target")) as child:
        group = child._process.pid
        os.killpg(group, 0)
        with pytest.raises(KeyboardInterrupt):
            child.ask("versions")
    assert all_gone(group)


def test_a_killed_child_is_noticed_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    arguments = {"model": str(DEMO / "target"), "max_model_len": 512, "enforce_eager": True}
    with BenchChild(tmp_path / "log", plugins="", **arguments) as child:
        child.ask("versions")
        group = child._process.pid
        os.kill(group, signal.SIGKILL)
        with pytest.raises(EngineDied):
            child.ask("versions")
    assert all_gone(group)
