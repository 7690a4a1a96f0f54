"""`examples/ray_data.py`: killed and resumed, it gives the same as an uninterrupted run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyarrow import Table, parquet
from vllm import LLM

from ray_engines.batch_parts import finished_ids, read_parts
from ray_engines.batch_run import BatchSettings, count_ids, read, run
from ray_engines.local_ray import local_ray
from support import ROOT
from support.engines import greedy, held_out_prompts
from support.replica_load import of_kind
from support.waiting import wait_for_end, wait_until

EXAMPLE = ROOT / "examples" / "ray_data.py"
ROWS, BATCH, TOKENS = 24, 4, 32
TOO_LONG, NOTHING = 5, 9

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def in_ray() -> Iterator[None]:
    with local_ray(2, show_log=False):
        yield


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = [row["prompt"] if path.suffix == ".txt" else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("data", ["a.jsonl", "a.txt", "a.parquet"])
def test_every_kind_of_data(in_ray: None, tmp_path: Path, data: str) -> None:
    rows = [{"key": f"k{number}", "prompt": f"line {number}"} for number in range(5)]
    if data == "a.parquet":
        parquet.write_table(Table.from_pylist(rows), tmp_path / data)
    else:
        save(tmp_path / data, rows)
    about = BatchSettings(data=str(tmp_path / data), out=tmp_path, model="", drafter=None)
    numbered = [{"id": number, "prompt": f"line {number}"} for number in range(5)]
    assert sorted(read(about).take_all(), key=lambda row: row["id"]) == numbered
    if data != "a.jsonl":
        return
    assert read(replace(about, limit=3)).take_all() == numbered[:3]
    named = read(replace(about, id_column="key"))
    found = sorted(named.take_all(), key=lambda row: row["id"])  # Ray mixes the order
    assert found == [{"id": f"k{number}", "prompt": f"line {number}"} for number in range(5)]
    assert count_ids(named, "key") == 5
    with pytest.raises(ValueError, match=r"has no column 'promt': it has .*prompt"):
        read(replace(about, prompt_column="promt"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["a", "b", "a"], "column 'key' holds 'a' more than once: leave out --id-column"),
        (["a", None, "b"], "a row has no value in column 'key'"),
    ],
)
def test_ids_that_would_lose_rows_are_refused(
    in_ray: None, tmp_path: Path, keys: list[str | None], message: str
) -> None:
    """A resumed run treats a row as done if its id is in the parts."""
    data = tmp_path / "a.jsonl"
    save(data, [{"key": key, "prompt": "x"} for key in keys])
    about = BatchSettings(
        data=str(data), out=tmp_path / "out", model="", drafter=None, id_column="key"
    )
    with pytest.raises(ValueError, match=message):
        run(about, lambda _: None)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Also holds Ray's own files: a killed Ray leaves them behind, and Ray needs a short path."""
    path = Path(tempfile.mkdtemp(prefix="rd-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def start(folder: Path, data: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLE), "--data", str(data), "--out", str(out)]
    command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "512"]
    command += ["--batch", str(BATCH), "--max-tokens", str(TOKENS)]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )


@pytest.mark.slow  # engines start twice
@pytest.mark.engine
def test_a_run_goes_on_where_it_was_killed(folder: Path, plain: LLM) -> None:
    data, out = folder / "data.jsonl", folder / "out"
    prompts: list[str | None] = [*held_out_prompts(ROWS)]
    prompts[TOO_LONG], prompts[NOTHING] = "word " * 1000, None
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))

    broken = start(folder, data, out)
    wait_until(lambda: any(out.glob("part-*")), "a part")
    family = psutil.Process(broken.pid).children(recursive=True)
    engines = of_kind(family, "MapWorker")  # named while they run: they may end at once
    assert engines
    wait_until(lambda: len(list(out.glob("part-*"))) >= 2, "some parts")
    broken.send_signal(signal.SIGKILL)
    broken.communicate()
    wait_for_end(engines)
    # Ray's agents check for their raylet only now and then, sometimes minutes apart.
    for one in psutil.wait_procs(family, timeout=1)[1]:
        one.kill()
    wait_for_end(family)
    done = finished_ids(out)
    assert 2 * BATCH <= len(done) < ROWS
    before = {path: path.stat().st_mtime_ns for path in out.glob("part-*")}
    shutil.rmtree(next(folder.glob("dflash-ray-*")))

    resumed = start(folder, data, out)
    said, _ = resumed.communicate()
    assert resumed.returncode == 0, (folder / "log").read_text()[-3000:]
    assert f"{ROWS} of {ROWS} rows" in said
    table = dict(line.strip("│ ").split("│") for line in said.splitlines() if "│" in line)
    counts = {name.strip(): value.strip() for name, value in table.items()}
    assert counts["skipped, done before"] == str(len(done))
    assert float(counts["acceptance length"]) > 1
    assert int(counts["refused (see their error)"]) == sum(
        number not in {int(one) for one in done} for number in (TOO_LONG, NOTHING)
    )
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not list(folder.glob("dflash-ray-*"))

    rows = sorted(read_parts(out), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(ROWS))
    assert [row["prompt"] for row in rows] == prompts
    refused = rows.pop(NOTHING), rows.pop(TOO_LONG)
    assert [row["text"] for row in refused] == [None, None]
    assert refused[0]["error"] == "there is no prompt"
    assert "max_model_len 512" in refused[1]["error"]
    answers = plain.generate([row["prompt"] for row in rows], greedy(TOKENS), use_tqdm=False)
    assert [row["text"] for row in rows] == [answer.outputs[0].text for answer in answers]
