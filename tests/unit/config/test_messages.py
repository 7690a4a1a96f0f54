"""What a refusal tells users to do instead, checked by its fragments."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import PretrainedConfig
from vllm import SamplingParams
from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

from support import ROOT
from support.log_lines import log_lines
from support.pairs import Pair, as_speculators, drafter_config
from vllm_dflash.checkpoint.read import read_drafter
from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.vllms_own import SWITCH_OFF


def refused(pair: Pair, speculative: dict[str, Any] | None = None, **engine: Any) -> ValueError:
    """Return why no engine starts; the log says it once, too."""
    with log_lines() as lines, pytest.raises(ValueError) as stopped:  # noqa: PT011 - read below
        pair.start(speculative, **engine)
    assert lines == [f"ERROR {stopped.value}"]
    return stopped.value


def test_an_engine_that_nobody_runs(pair: Pair) -> None:
    message = str(refused(pair, watermark_config={"algorithm": "gumbel"}))
    fragments = (
        *("Leave --watermark-config out", "leave the speculative config out"),
        'or add "draft_sample_method": "probabilistic"',
    )
    assert [fragment for fragment in fragments if fragment not in message] == []
    assert "trained for this target" not in message  # no other drafter would help


@pytest.mark.parametrize(("count", "is_none"), [(0, True), (-1, False)])
def test_no_drafts_at_all(pair: Pair, count: int, is_none: bool) -> None:
    error = refused(pair, {"num_speculative_tokens": count})
    message = str(error)
    assert (error.__cause__, error.__suppress_context__) == (None, True)  # no pydantic above it
    assert f"a positive integer, not {count}." in message
    assert ("serve without drafts, leave the whole speculative config out" in message) is is_none


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (drafter_config(head_dim=12), "head_dim is 12: vLLM's CPU kernels need a multiple of 8"),
        (
            drafter_config(hidden_size=60, target_hidden_size=64),
            "hidden_size is 60: vLLM's CPU kernels need a multiple of 8",
        ),
        (
            {**as_speculators(drafter_config()), "speculators_config": None},
            "has speculators_model_type but no speculators_config, by which vLLM recognises",
        ),
    ],
)
def test_a_config_that_is_refused(
    pair: Pair, tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    shutil.copytree(pair.drafter, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = refused(pair, {"model": str(tmp_path)})
    assert isinstance(error, DrafterError)
    assert re.search(words, str(error), re.DOTALL)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("models/demo/draftr", "no such folder, and not a repository name"),
        ("{here}/models/demo/draftr", "this folder does not exist"),
        ("models/demo/drafter/config.json", "this is not a folder"),
    ],
)
def test_a_wrong_path_is_one_line(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, says: str
) -> None:
    there = tmp_path / "models" / "demo"
    shutil.copytree(pair.drafter, there / "drafter")
    (there / "drafttr").mkdir()  # a nearer name, but no model
    monkeypatch.chdir(tmp_path)
    error = refused(pair, {"model": written.format(here=tmp_path)})
    assert f": {says}" in str(error)
    assert "\n" not in str(error)
    assert error.__cause__ is None
    assert error.__context__ is None or error.__suppress_context__
    if says != "this is not a folder":
        assert "models/demo/drafter'?)" in str(error)


def test_a_repository_that_cannot_be_read_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("We couldn't connect to the hub.\nCheck your internet connection") from (
            ConnectionError("no route")
        )

    monkeypatch.setattr(PretrainedConfig, "get_config_dict", unreachable)
    with pytest.raises(DrafterError) as stopped:
        read_drafter("someone/drafter")
    message = str(stopped.value)
    assert "no such folder, and in the repository of that name" in message
    assert "We couldn't connect to the hub." in message
    assert "Check its name and the network, or pass a folder" in message
    assert "\n" not in message
    assert (stopped.value.__cause__, stopped.value.__suppress_context__) == (None, True)


def test_target_and_drafter_swapped(pair: Pair) -> None:
    drafter, target = str(pair.drafter), str(pair.target)
    message = str(refused(pair, {"model": target}, model=drafter))
    assert "are the two swapped?" in message
    assert f"If so, serve '{target}' and set 'model'" in message
    message = str(refused(pair, model=drafter))
    assert f"target '{drafter}' is a DFlash drafter itself" in message
    assert "swapped" not in message


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        ({"num_speculative_tokens": 3}, None),  # follows all of the advice
        ({}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 3, "draft_length": "fixed"}, "draft_length"),
    ],
)
def test_vllm_alone_takes_what_the_advice_leaves(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], fault: str | None
) -> None:
    assert fault is None or fault in SWITCH_OFF
    ours = EngineArgs.create_speculative_config
    monkeypatch.setattr(EngineArgs, "create_speculative_config", ours.__wrapped__)
    given = {"method": "dflash", "model": str(pair.drafter), **asked}
    args = EngineArgs(model=str(pair.target), skip_tokenizer_init=True, speculative_config=given)
    if fault is None:
        assert args.create_engine_config().speculative_config.method == "dflash"
        return
    with pytest.raises(ValueError, match=fault):
        args.create_engine_config()


@pytest.mark.parametrize("asked", [{"min_p": 0.1}, {"logit_bias": {1: 2.0}}])
def test_vllm_refuses_what_the_documentation_says(asked: dict[str, Any]) -> None:
    """vLLM does so with any method. If it stops, docs/compatibility.md and README are wrong."""
    with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
        SamplingParams(**asked)._validate_spec_decode(cast(SpeculativeConfig, object()))
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert all(f"`{name}`" in page for name in asked)
