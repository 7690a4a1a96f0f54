"""The file of estimates: which engine it belongs to, that it is never read half-written, and when
it is written."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.configs_by_hand import QWEN
from support.fake_time import FakeTime
from support.log_lines import log_lines
from support.planner_world import MAX_DRAFT, MOST_FREE, World, names, planner
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.config.mode import ADDITIONAL_CONFIG_KEY, Mode
from vllm_dflash.engine import estimates_file
from vllm_dflash.engine.estimates_file import (
    INTERVAL,
    LEAST_STEPS,
    EstimatesFile,
    EstimatesKeeper,
    device_name,
    engine_key,
)

SIZES = (MAX_DRAFT, 64)
OPTIONS = Mode(MOST_FREE, MAX_DRAFT, "adaptive", parse_config("z-lab/it", QWEN))


def vllm_config(options: Mode = OPTIONS, **changes: Any) -> Any:
    """As much of vLLM's config as the key reads; `changes` replaces fields, by name."""
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": "Qwen/target",
            "revision": None,
            "quantization": None,
            "dtype": "torch.bfloat16",
            "enforce_eager": False,
        },
        "speculative_config": {"revision": None},
        "scheduler_config": {"max_num_seqs": 64, "async_scheduling": False},
        "parallel_config": {"tensor_parallel_size": 1},
    }
    for part in parts.values():
        part.update({name: changes[name] for name in part if name in changes})
    additional = {ADDITIONAL_CONFIG_KEY: options.to_json()}
    configs = {name: SimpleNamespace(**part) for name, part in parts.items()}
    lora = changes.get("lora_config")
    return SimpleNamespace(**configs, additional_config=additional, lora_config=lora)


def learned(steps: int = 50) -> Any:
    policy = planner()
    World(policy).run(names(4), steps)
    return policy.estimates()


@pytest.fixture
def file(tmp_path: Path) -> EstimatesFile:
    return EstimatesFile(str(tmp_path / "kept"), engine_key(vllm_config()))


def test_what_is_written_is_read(file: EstimatesFile) -> None:
    with log_lines() as lines:
        assert file.read(*SIZES) is None
    assert lines == [f"INFO estimates of costs and acceptance will be kept in {file.path}"]
    for known in (learned(), learned(90)):
        file.write(known.to_dict())
        with log_lines() as lines:
            read = file.read(*SIZES)
        assert read is not None
        assert read.to_dict() == known.to_dict()
        assert lines == []
    assert list(file.path.parent.iterdir()) == [file.path]
    assert file.path.name.startswith("target_it-")


@pytest.mark.parametrize(
    "config",
    [
        vllm_config(model="Qwen/other"),
        vllm_config(revision="abc"),
        vllm_config(quantization="fp8"),
        vllm_config(dtype="torch.float32"),
        vllm_config(enforce_eager=True),
        vllm_config(max_num_seqs=65),
        vllm_config(async_scheduling=True),
        vllm_config(tensor_parallel_size=2),
        vllm_config(lora_config=object()),
        vllm_config(replace(OPTIONS, num_speculative_tokens=3)),
        vllm_config(replace(OPTIONS, draft_width=3)),
        vllm_config(replace(OPTIONS, most_free=7)),
        vllm_config(replace(OPTIONS, drafter_ranks=2)),
        vllm_config(replace(OPTIONS, drafter=parse_config("z-lab/that", QWEN))),
    ],
)
def test_another_engine_has_another_file(file: EstimatesFile, config: Any) -> None:
    other = EstimatesFile(file.folder, engine_key(config))
    assert other.path != file.path
    assert other.key != file.key


def test_another_runner_machine_or_version(
    file: EstimatesFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine_key(vllm_config(replace(OPTIONS, runner="v2"))) != file.key
    for name, changed in (
        ("device_name", lambda: "another"),
        ("__version__", "0"),
        ("vllm.__version__", "0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"{estimates_file.__name__}.{name}", changed)
            assert engine_key(vllm_config()) != file.key
    assert engine_key(vllm_config()) == file.key


def test_where_it_lies_makes_no_other_engine(file: EstimatesFile) -> None:
    moved = replace(OPTIONS, estimates_folder="/elsewhere")
    assert engine_key(vllm_config(moved)) == file.key
    assert json.loads(json.dumps(file.key)) == file.key


def test_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(estimates_file, "CPU_INFO", info)
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert device_name() == "aarch64, 3 threads"
    info.write_text("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nmodel name\t: A CPU @ 2 GHz\n")
    assert device_name() == "A CPU @ 2 GHz, 3 threads"
    info.write_text("processor\t: 0\n")
    assert device_name() == "aarch64, 3 threads"
    gpu = SimpleNamespace(is_cpu=lambda: False, get_device_name=lambda: "A GPU")
    monkeypatch.setattr(estimates_file, "current_platform", gpu)
    assert device_name() == "A GPU"


def changed(**parts: Any) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), **parts})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], ""),
        (lambda text: "", ""),
        (lambda text: "[]", "another version"),
        (lambda text: "[" * 100_000, ""),
        (lambda text: text.replace("1", "NaN", 1), ""),
        (changed(schema=0), "another version"),
        (changed(key={}), "another engine"),
        (changed(estimates=None), ""),
        (changed(estimates={"costs": []}), ""),
    ],
)
def test_what_is_damaged_is_not_used(
    file: EstimatesFile, damage: Callable[[str], str], words: str
) -> None:
    file.write(learned().to_dict())
    file.path.write_text(damage(file.path.read_text()))
    with log_lines() as lines:
        assert file.read(*SIZES) is None
    (line,) = lines
    assert line.startswith(f"WARNING {file.path} is not used, and will be replaced: ")
    assert words in line
    file.write(learned().to_dict())
    assert file.read(*SIZES) is not None


def test_bytes_and_folders_are_not_used(file: EstimatesFile) -> None:
    file.path.mkdir(parents=True)
    assert file.read(*SIZES) is None
    file.path.rmdir()
    file.path.write_bytes(b"\xff\xfe\x00")
    assert file.read(*SIZES) is None


def test_nobody_reads_half_a_file(file: EstimatesFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that dies leaves the old file as it was, and nothing else."""
    known = learned()
    file.write(known.to_dict())

    def fails(*_: Any) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="killed"):
            file.write(learned(90).to_dict())
    read = file.read(*SIZES)
    assert read is not None
    assert read.to_dict() == known.to_dict()
    assert list(file.path.parent.iterdir()) == [file.path]


def test_several_may_write(file: EstimatesFile) -> None:
    """At the same time, while another reads."""
    each = [learned(steps).to_dict() for steps in (20, 40, 60)]
    file.write(each[0])
    writers = [
        threading.Thread(target=lambda mine=mine: [file.write(mine) for _ in range(30)])
        for mine in each
    ]
    for writer in writers:
        writer.start()
    for _ in range(50):
        read = file.read(*SIZES)
        assert read is not None
        assert read.to_dict() in each
    for writer in writers:
        writer.join()
    assert list(file.path.parent.iterdir()) == [file.path]


class Written:
    """Replaces a file; counts how often it is written."""

    def __init__(self, *, is_there: bool = True) -> None:
        self.recalled = planner().estimates() if is_there else None
        self.path = Path("F")
        self.times, self.fails = 0, False
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def write(self, estimates: dict[str, Any]) -> None:
        self.may_go_on.wait(10)
        self.times += 1
        if self.fails:
            raise OSError("no space left")


def ticked(keeper: EstimatesKeeper, steps: int) -> None:
    for _ in range(steps):
        keeper.tick()
    if keeper._writer is not None:
        keeper._writer.join()


def test_when_it_is_written() -> None:
    """Every minute in which there was something to learn, and at the end."""
    file: Any = Written()
    now = 0.0
    keeper = EstimatesKeeper(file, planner(), clock=lambda: now)
    ticked(keeper, 3 * LEAST_STEPS)
    assert file.times == 0
    now = INTERVAL
    ticked(keeper, LEAST_STEPS)
    assert file.times == 1
    now = 1.5 * INTERVAL
    ticked(keeper, LEAST_STEPS)
    assert file.times == 1
    now = 2 * INTERVAL
    ticked(keeper, LEAST_STEPS - 1)
    assert file.times == 2
    keeper.close()
    assert file.times == 2  # too few steps since then
    ticked(keeper, 2)
    keeper.close()
    keeper.close()
    assert file.times == 3


def test_what_the_first_start_has_measured_is_kept_at_once() -> None:
    """The next start is then faster, however soon this engine ends."""
    file: Any = Written(is_there=False)
    keeper = EstimatesKeeper(file, planner(), clock=lambda: 0.0)
    ticked(keeper, 1)
    assert file.times == 1
    ticked(keeper, LEAST_STEPS - 1)
    keeper.close()
    assert file.times == 1


def test_no_step_waits_for_a_disk() -> None:
    file: Any = Written()
    time = FakeTime()
    keeper = EstimatesKeeper(file, planner(), clock=lambda: time.now)
    file.may_go_on.clear()
    for _ in range(2):
        time.now += INTERVAL
        for _ in range(LEAST_STEPS):
            keeper.tick()
    assert file.times == 0
    file.may_go_on.set()
    keeper.close()
    assert file.times == 2


def test_a_full_disk_is_told_once_and_when_it_is_over() -> None:
    file: Any = Written()
    file.fails = True
    time = FakeTime()
    keeper = EstimatesKeeper(file, planner(), clock=lambda: time.now)
    with log_lines() as lines:
        for _ in range(2):
            time.now += INTERVAL
            ticked(keeper, LEAST_STEPS)
        for file.fails in (False, False, True):
            ticked(keeper, LEAST_STEPS)
            keeper.close()
    assert file.times == 5
    no_space = "WARNING estimates cannot be written to F, will try again: no space left"
    assert lines == [no_space, "INFO estimates are written to F again", no_space]


def test_a_file_is_there_if_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates_file, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(estimates_file, "from_rank_0", lambda value: value)
    assert EstimatesFile.of(vllm_config()) is None
    config = vllm_config(replace(OPTIONS, estimates_folder=str(tmp_path)))
    file = EstimatesFile.of(config)
    assert file is not None
    assert file.recalled is None
    old, new = planner(), planner()
    World(old).run(names(4), 300)
    keeper = EstimatesKeeper(file, old)
    ticked(keeper, LEAST_STEPS)
    keeper.close()
    file = EstimatesFile.of(config)
    assert file is not None
    assert file.recalled is not None
    assert file.recalled.to_dict() == old.estimates().to_dict()
    EstimatesKeeper(file, new)
    assert new.block_chances.seen.sum() > 0
    assert new.block_chances.bias_of_all.tolist() == old.block_chances.bias_of_all.tolist()


def test_what_rank_0_reads_is_recalled_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks may have no such file, or another one, which they do not read."""
    config, known = vllm_config(replace(OPTIONS, estimates_folder=str(tmp_path))), learned()
    asked: list[Any] = []
    monkeypatch.setattr(estimates_file, "get_tensor_model_parallel_rank", lambda: 1)
    monkeypatch.setattr(estimates_file, "from_rank_0", lambda own: asked.append(own) or known)
    with log_lines() as lines:
        file = EstimatesFile.of(config)
    assert file is not None
    assert file.recalled is known
    assert asked == [None]
    assert lines == []
