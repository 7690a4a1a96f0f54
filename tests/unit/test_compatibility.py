"""Which vLLM versions our engines run in, and that all others run vLLM's own DFlash."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import vllm

from support.log_lines import log_lines
from support.pairs import Pair
from vllm_dflash import compatibility, seams
from vllm_dflash.config.engine_options import ADDITIONAL_CONFIG_KEY, CPU_WORKER_V1, MOST_FREE_DRAFTS
from vllm_dflash.seams import ENGINE, FRONT_END, LILICORR, V1_WORKER, V2_WORKER, Seam
from vllm_dflash.vllm_sources import MissingError, Sources

INSTALLED = vllm.__version__
EVERYWHERE = {seam.path: seam for seam in (*FRONT_END, *ENGINE, *V1_WORKER, *V2_WORKER, *LILICORR)}
OURS: dict[str, Any] = {"draft_length": "fixed", "free_drafts": "off"}


def is_ours(config: Any) -> bool:
    return config.parallel_config.worker_cls == CPU_WORKER_V1


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Sources:
    """vLLM's sources, which are parsed once, and compared each time."""
    found = Sources(Path(vllm.__file__).parents[1])
    compare = compatibility.first_difference.__wrapped__
    monkeypatch.setattr(compatibility, "first_difference", compare)
    monkeypatch.setattr(compatibility, "Sources", lambda folder: found)
    return found


def version_is(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Change the version that vLLM reports. Its contents are still those that are installed."""
    is_in = Seam.is_in
    monkeypatch.setattr(Seam, "is_in", lambda seam, _: is_in(seam, INSTALLED))
    monkeypatch.setattr("vllm.__version__", version)


def said_of(pair: Pair, version: str) -> list[str]:
    """Log lines of an engine of ours that name the version."""
    with log_lines() as lines:
        assert is_ours(pair.start())
    return [line for line in lines if version in line]


@pytest.mark.parametrize(
    "version", ["0.32", "0.32.0", "0.32.0+cpu", "0.32.1", "0.33.0+cu130", "0.33.2"]
)
def test_releases_that_tests_run_with_say_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    version_is(monkeypatch, version)
    assert not said_of(pair, version)


@pytest.mark.parametrize(
    "version", ["0.33.0rc2", "0.33.1rc1.dev12+gabc", "0.34.0rc1", "0.34.0", "1.0", "dev"]
)
def test_others_with_all_we_rely_on_are_ours_and_said_to_be_untested(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    version_is(monkeypatch, version)
    (line,) = said_of(pair, f"vLLM {version}")
    assert line.startswith("WARNING")
    assert "never tested" in line
    assert str(seams.SUPPORTED_VLLM) in line


@pytest.mark.parametrize("version", ["0.31.0", "0.31.9+cpu", "0.11.2"])
def test_older_ones_run_vllms_own(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    version_is(monkeypatch, version)
    with log_lines() as lines:
        config = pair.start(OURS)
    assert not is_ours(config)
    assert config.speculative_config.num_speculative_tokens == 7 != MOST_FREE_DRAFTS
    assert ADDITIONAL_CONFIG_KEY not in config.additional_config
    (line,) = [line for line in lines if "stays out" in line]
    assert line.startswith("WARNING")
    assert f"this is vLLM {version}" in line
    assert "install a newer vLLM" in line
    assert all(repr(option) in line for option in OURS)


@pytest.mark.parametrize("required", [False, None, True, "true"])
@pytest.mark.parametrize(
    "path",
    [
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_run",
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
    ],
    ids=["worker", "scheduler", "front end"],
)
def test_a_process_that_would_not_start_is_vllms_before_anything_does(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, sources: Sources, path: str, required: Any
) -> None:
    """If the user requires ours, the start stops with an error that names the reason."""
    find = sources.find

    def found(asked: str) -> tuple[Path, ast.stmt]:
        if asked == path:
            raise MissingError("it is gone")
        return find(asked)

    monkeypatch.setattr(sources, "find", found)
    if required:
        with log_lines() as lines, pytest.raises(ValueError, match=f"cannot run .*{path}"):
            pair.start({"require": required})
        assert [line for line in lines if line.startswith("ERROR")]
        return
    with log_lines() as lines:
        assert not is_ours(pair.start({"require": required, **OURS}))
    assert len([line for line in lines if path in line and "stays out" in line]) == 1


def test_each_seam_that_is_gone_or_takes_others_is_named(
    monkeypatch: pytest.MonkeyPatch, sources: Sources
) -> None:
    assert compatibility.why_unfit(tuple(EVERYWHERE.values())) is None
    find, other = sources.find, ast.parse("def f(self, other): ...").body[0]
    broken = ""

    def gone(asked: str) -> tuple[Path, ast.stmt]:
        if asked == broken:
            raise MissingError("it is gone")
        return find(asked)

    def changed(asked: str) -> tuple[Path, ast.stmt]:
        return (Path(), other) if asked == broken else find(asked)

    here = [path for path, seam in EVERYWHERE.items() if seam.is_in(INSTALLED)]
    for broken in here:
        monkeypatch.setattr(sources, "find", gone)
        assert f"has no {broken}," in str(compatibility.why_unfit(tuple(EVERYWHERE.values())))
        monkeypatch.setattr(sources, "find", changed)
        why = compatibility.why_unfit(tuple(EVERYWHERE.values()))
        assert (why is None) == (EVERYWHERE[broken].parameters is None), broken
        assert why is None or f"{broken} takes (self other)" in why
    assert len(here) > 80


def test_sources_are_read_once_for_all_engines_of_a_process(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    compatibility.first_difference.cache_clear()
    monkeypatch.setattr(compatibility, "Sources", lambda at: read.append(at) or Sources(at))
    assert all(is_ours(pair.start()) for _ in range(3))
    assert read == [Path(vllm.__file__).parents[1]]


@pytest.mark.parametrize("version", [INSTALLED, "0.34.0"])
def test_what_workers_import_of_an_untested_vllm_has_to_be_there(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, sources: Sources, version: str
) -> None:
    """They would end with an ImportError. A tested vLLM is known to have it."""
    gone, has = "vllm.v1.outputs:AsyncModelRunnerOutput", sources.has
    monkeypatch.setattr(sources, "has", lambda path: path != gone and has(path))
    version_is(monkeypatch, version)
    with log_lines() as lines:
        assert is_ours(pair.start()) == (version == INSTALLED)
    assert any(f"it has no {gone} (" in line for line in lines) == (version != INSTALLED)


@pytest.mark.parametrize("name", ["__init__.pyc", "__init__.so"])
def test_a_vllm_without_sources_is_said_to_lack_them(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("vllm.__file__", str(tmp_path / "vllm" / name))
    with log_lines() as lines:
        assert not is_ours(pair.start())
    (line,) = [line for line in lines if "stays out" in line]
    assert f"this is vLLM {INSTALLED} without its sources" in line
    assert "install a vLLM with its .py files" in line


def test_what_cannot_even_be_asked_is_vllms(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> None:
        raise ImportError("cannot import name 'HAS_TRITON'")

    monkeypatch.setattr("vllm_dflash.config.left_to_vllm.runner_here", ask)
    with log_lines() as lines:
        assert not is_ours(pair.start())
    assert "does not know vLLM" in "".join(lines)
    assert "HAS_TRITON" in "".join(lines)


def test_each_row_beside_native_033_names_tests_that_there_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
    rows = page.partition("## Native 0.33 and ours")[2].partition("\n## ")[0].split("\n|")[3:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`((?:unit|engine)/[\w/]+\.py)`", row)
        assert named or "| none |" in row, row
        assert all((Path(__file__).parents[1] / name).is_file() for name in named), row
