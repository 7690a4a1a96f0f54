"""`vllm-dflash verify` as a command: what it refuses, runs and writes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support import DEMO
from support.engines import FIXED, TARGET
from vllm_dflash.tools import cli
from vllm_dflash.tools.console import COULD_NOT_RUN
from vllm_dflash.tools.prompts import BUILT_IN, default_prompts, read_prompts
from vllm_dflash.tools.server import other_plugins
from vllm_dflash.tools.verify import verify_command as command
from vllm_dflash.tools.verify.verification import Level, Verification
from vllm_dflash.tools.verify.verify_command import required

PAIR = ["--target", str(TARGET), "--speculative-config", json.dumps(FIXED)]
LOSSLESS = (Level.of(1, 9, 3.0, ((),)),)
ABOUT = {"prompts": 1, "tokens": 5, "dtype": "bfloat16", "drafter": "somebody"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record calls of `verify_pair`, which finds no faults."""
    calls: list[Any] = []

    def answer(*arguments: Any, **named: Any) -> Verification:
        calls.append((arguments, named))
        return Verification(dict(ABOUT), 0.2, LOSSLESS)

    monkeypatch.setattr(command, "verify_pair", answer)
    return calls


def test_default_prompts() -> None:
    held_out = read_prompts(DEMO / "held_out.jsonl")
    built_in = read_prompts(BUILT_IN)
    assert len(built_in) == 16
    assert default_prompts(str(TARGET)) == [*held_out, *built_in]
    assert default_prompts("somewhere/else") == built_in


def test_an_empty_speculative_config(capsys: pytest.CaptureFixture[str]) -> None:
    """Both engines would decode plainly."""
    assert cli.main(["verify", "--target", "x", "--speculative-config", "{}"]) == COULD_NOT_RUN
    assert "the speculative config is empty" in capsys.readouterr().err


def test_arguments_arrive(asked: list[Any]) -> None:
    flags = ["--concurrency", "4", "2", "4", "--tokens", "7", "--dtype", "float32"]
    assert cli.main(["verify", *PAIR, *flags, "--", "--max-model-len", "64"]) == 0
    (((target, config, prompts, settings, flags, _), _),) = asked
    assert (target, config) == (str(TARGET), FIXED)
    assert prompts == default_prompts(str(TARGET))
    assert (settings.concurrency, settings.tokens, settings.tie) == ((4, 2), 7, None)
    assert flags == ["--max-model-len", "64", "--dtype", "float32"]


def test_json_and_file(
    asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "result.json"
    assert cli.main(["verify", *PAIR, "--json", "--out", str(file)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(file.read_text())
    assert (printed["schema"], printed["verdict"]) == ("vllm-dflash.verify/1", "lossless")
    assert printed["levels"][0]["drafts_verified"] == 9
    # A file that cannot be written costs no result.
    assert cli.main(["verify", *PAIR, "--json", "--out", str(tmp_path)]) == COULD_NOT_RUN
    again, said = capsys.readouterr()
    assert json.loads(again)["verdict"] == "lossless"
    assert str(tmp_path) in said


def test_what_cannot_be_printed_is_written(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe may be closed; an encoding lacks letters."""
    file = tmp_path / "result.json"

    def closed(*_: Any) -> None:
        raise BrokenPipeError

    with monkeypatch.context() as broken:
        broken.setattr(command, "print_report", closed)
        assert cli.main(["verify", *PAIR, "--out", str(file)]) == COULD_NOT_RUN
    assert json.loads(file.read_text())["verdict"] == "lossless"
    monkeypatch.setattr(command, "make_notes", lambda _: ["你"])
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert cli.main(["verify", *PAIR]) == 0
    assert printed.getvalue().endswith(b"\n\\u4f60\n")


@pytest.mark.parametrize(
    ("plugins", "written", "require"),
    [
        (None, {"method": "dflash"}, True),
        ("mine,dflash", {"method": "dflash"}, True),
        (None, {"model": "some/Qwen3-8B-DFlash"}, True),
        (None, {"method": "dflash", "require": False}, False),
        ("", {"method": "dflash"}, None),
        ("mine", {"method": "dflash"}, None),
        (None, {"method": "ngram"}, None),
    ],
)
def test_what_is_verified_is_ours(
    monkeypatch: pytest.MonkeyPatch,
    plugins: str | None,
    written: dict[str, Any],
    require: bool | None,
) -> None:
    """vLLM's own method is verified only for those who say so."""
    if plugins is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    assert required(written).get("require") is require
    assert {**required(written), **written} == required(written)


def test_plain_decoding_keeps_the_plugins_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "dflash,mine")
    assert other_plugins() == ["mine"]
    monkeypatch.setenv("VLLM_PLUGINS", "")  # none at all
    assert not any(other_plugins())
    monkeypatch.delenv("VLLM_PLUGINS")
    assert "dflash" not in other_plugins()
    assert "lora_hf_hub_resolver" in other_plugins()  # vLLM's own
