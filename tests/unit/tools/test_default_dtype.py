"""The commands use float32 if the CPU has no bfloat16 instructions, unless told otherwise."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from support import DEMO
from vllm_dflash.tools import cli
from vllm_dflash.tools.bench.bench_runs import Comparison
from vllm_dflash.tools.default_dtype import IN_FLOAT32, with_dtype
from vllm_dflash.tools.progress import Progress

AVX2, AVX512 = (
    {"architecture": "x86_64", "avx512_bf16": False},
    {"architecture": "x86_64", "avx512_bf16": True},
)
PAIR = "--target", str(DEMO / "target"), "--drafter", str(DEMO / "drafter")


def chosen(given: str | None, *flags: list[str], target: str = PAIR[1]) -> tuple[list[str], str]:
    said = io.StringIO()
    return with_dtype(given, Progress(said), target, *flags), said.getvalue()


@pytest.fixture
def on_cpu_with(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda features: monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)


@pytest.mark.parametrize(
    ("features", "dtype"), [(AVX2, "float32"), (AVX512, None), ({"architecture": "aarch64"}, None)]
)
def test_without_instructions_for_bfloat16_it_is_float32(
    on_cpu_with: Any, features: dict[str, Any], dtype: str | None
) -> None:
    on_cpu_with(features)
    flags, said = chosen(None)
    assert flags == (["--dtype", dtype] if dtype else [])
    assert said == (f"{IN_FLOAT32}\n" if dtype else "")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("bfloat16", ["-x"]), ["-x", "--dtype", "bfloat16"]),
        ((None, ["--dtype=bfloat16"]), ["--dtype=bfloat16"]),
    ],
)
def test_users_have_the_last_word(on_cpu_with: Any, arguments: Any, wanted: list[str]) -> None:
    on_cpu_with(AVX2)
    assert chosen(*arguments) == (wanted, "")


@pytest.mark.parametrize(("written", "dtype"), [({}, "float32"), ({"quant_method": "awq"}, None)])
def test_quantised_targets_keep_theirs(
    on_cpu_with: Any, tmp_path: Path, written: dict[str, str], dtype: str | None
) -> None:
    """vLLM's AWQ, GPTQ and FP8 lack float32. The engine refuses what cannot be read."""
    on_cpu_with(AVX2)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": written}))
    assert chosen(None, target=str(tmp_path))[0] == (["--dtype", dtype] if dtype else [])
    assert chosen(None, target=str(tmp_path / "nowhere"))[0] == ["--dtype", "float32"]


def test_a_gpu_keeps_the_models_dtype(on_cpu_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu_with(AVX2)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert chosen(None) == ([], "")


def test_commands_ask_for_it(
    on_cpu_with: Any,
    monkeypatch: pytest.MonkeyPatch,
    comparisons: list[Comparison],
    tmp_path: Path,
) -> None:
    on_cpu_with(AVX2)
    started: list[list[str]] = []

    def start(log: Path, target: str, flags: Sequence[str], **_: Any) -> None:
        started.append([*flags])
        raise ValueError

    monkeypatch.setattr("vllm_dflash.tools.bench.sides.Server", start)
    monkeypatch.setattr("vllm_dflash.tools.verify.verify_command.Server", start)
    assert cli.main(["bench", *PAIR, "--quick", "--out", str(tmp_path)]) == 0
    cli.main(["demo", *PAIR, "--out", str(tmp_path)])
    config = f'{{"method": "dflash", "model": "{DEMO}/drafter"}}'
    cli.main(["verify", *PAIR[:2], "--speculative-config", config])
    assert len(started) == 2
    for flags in (comparisons[0].flags, *started):
        assert flags[flags.index("--dtype") + 1] == "float32"
