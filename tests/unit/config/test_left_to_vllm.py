"""Engines that vLLM's own code runs are handed to it as if vllm-dflash were not installed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry

from support.log_lines import log_lines
from support.pairs import Pair, as_speculators, drafter_config
from support.who_runs import engine
from vllm_dflash.config.engine_options import ADDITIONAL_CONFIG_KEY
from vllm_dflash.config.left_to_vllm import config_of_drafter
from vllm_dflash.model.draft_model import DFlashDraftModel
from vllm_dflash.vllms_own import OWN_KEYS


def outcome(args: EngineArgs) -> dict[str, Any]:
    """Return the result of an engine's start, as far as a plugin could change it."""
    try:
        config = args.create_engine_config()
    except Exception as error:
        return {"refused": type(error).__name__, "message": str(error)}
    speculative, draft = config.speculative_config, config.speculative_config.draft_model_config
    left_out = ("target_model_config", "draft_model_config")
    return {
        "worker": config.parallel_config.worker_cls,
        "scheduler": config.scheduler_config.scheduler_cls,
        "one cache group": config.scheduler_config.disable_hybrid_kv_cache_manager,
        "additional": config.additional_config,
        "speculative": {
            field.name: str(getattr(speculative, field.name))
            for field in dataclasses.fields(speculative)
            if field.name not in left_out and not field.name.endswith("parallel_config")
        },
        "draft": str(draft.hf_config.to_dict()),
        "architectures": draft.architectures,
    }


def drafter(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_without_us(monkeypatch: pytest.MonkeyPatch, pair: Pair, model: Path, **asked: Any) -> Any:
    """Return the outcome, which must be the same with and without our hook."""
    asked["model"] = str(model)
    ours = outcome(engine(pair, asked, {}))
    registered = ModelRegistry.models["DFlashDraftModel"]
    assert getattr(registered, "model_cls", None) is not DFlashDraftModel
    original = EngineArgs.create_speculative_config.__wrapped__
    with monkeypatch.context() as without:
        without.setattr(EngineArgs, "create_speculative_config", original)
        assert outcome(engine(pair, asked, {})) == ours
    return ours


VLLMS_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
FOREIGN = {
    "DFlashLagunaForCausalLM": "DFlashLagunaForCausalLM",
    "LagunaForCausalLM": "DFlashLagunaForCausalLM",
    "MuseGlimmerAssistantModel": "DFlashMuseGlimmerAssistantModel",
    "DFlashMuseGlimmerAssistantModel": "DFlashMuseGlimmerAssistantModel",
}
"""Architecture in a checkpoint -> architecture that vLLM looks up."""


@pytest.mark.parametrize("written", FOREIGN)
@pytest.mark.parametrize("method", ["dflash", None])
def test_another_architecture_is_vllms(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, method: str | None
) -> None:
    model = drafter(tmp_path / "some-dflash", drafter_config(architectures=[written]))
    with log_lines() as lines:
        found = as_without_us(monkeypatch, pair, model, method=method)
    (line,) = lines
    assert line.startswith("WARNING vllm-dflash stays out")
    assert f"has architecture {FOREIGN[written]}, which vLLM's own code runs" in line
    assert found["architectures"] == [FOREIGN[written]]
    assert found["worker"] == VLLMS_WORKER
    assert ADDITIONAL_CONFIG_KEY not in found["additional"]


def test_dspark_as_speculators_writes_it_runs_in_vllm_with_a_hint(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**as_speculators(drafter_config()), "speculators_model_type": "dspark"}
    model = drafter(tmp_path / "it", config)
    with log_lines() as lines:
        found = as_without_us(monkeypatch, pair, model)
    assert found["architectures"] == ["Qwen3DSparkModel"]
    assert 'write "method": "dspark"' in lines[0]


OWN = {
    "draft_length": "fixed",
    "drafter_overrides": {"sliding_window": 9},
    "free_drafts": "nonsense",
    "require": False,
    "draft-tree": 3,
    "draft_window": 64,
}


@pytest.mark.parametrize("flags", [{}, {"spec_method": "dflash"}, {"spec_tokens": 3}])
def test_our_options_are_removed_for_vllm(pair: Pair, flags: dict[str, Any]) -> None:
    """The number of drafts is filled in, which vLLM requires and we do not."""
    asked = {"num_speculative_tokens": None, **OWN}
    if "spec_method" in flags:
        asked["method"] = None
    args = engine(pair, asked, {"worker_cls": VLLMS_WORKER, **flags})
    with log_lines() as lines:
        config = args.create_engine_config()
    assert config.speculative_config.num_speculative_tokens == flags.get("spec_tokens", 7)
    (line,) = lines
    assert "worker_cls is" in line
    assert {name.replace("-", "_") for name in OWN} == {*OWN_KEYS}
    names = ", ".join(map(repr, OWN_KEYS))
    assert f"runs this engine, without {names}, which it does not know." in line


def test_all_that_came_by_flags(pair: Pair) -> None:
    flags = {"spec_method": "dflash", "spec_model": str(pair.drafter)}
    args = engine(pair, {}, {"worker_cls": VLLMS_WORKER, **flags})
    args.speculative_config = None
    assert args.create_engine_config().speculative_config.num_speculative_tokens == 7


def test_a_drafter_that_is_redirected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM_MODEL_REDIRECT_PATH maps names to folders; vLLM applies it to drafters as well."""
    folder = drafter(tmp_path / "here", {"architectures": ["LagunaForCausalLM"]})
    redirect = {"some/drafter": str(folder)}.get
    monkeypatch.setattr("vllm.transformers_utils.utils.maybe_model_redirect", redirect)
    assert config_of_drafter({"model": "some/drafter"})["architectures"] == ["LagunaForCausalLM"]
