"""Activation: what is hooked and when, and that a changed vLLM is refused by name."""

import functools
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.worker import gpu_model_runner

from support.log_lines import log_lines
from support.pairs import Pair, drafter_config, save_drafter
from support.who_runs import OURS, EngineCell, changed
from vllm_dflash import plugin
from vllm_dflash.checkpoint.spec import ARCHITECTURE
from vllm_dflash.config.engine_options import (
    ADDITIONAL_CONFIG_KEY,
    CPU_WORKER_V1,
    MOST_FREE_DRAFTS,
    EngineOptions,
)
from vllm_dflash.model import registration
from vllm_dflash.model.draft_model import DFlashDraftModel
from vllm_dflash.vllms_own import OWN_KEYS


def test_selection_fills_in_what_the_checkpoint_says(pair: Pair) -> None:
    config = pair.start()
    assert config.speculative_config.num_speculative_tokens == MOST_FREE_DRAFTS
    assert config.parallel_config.worker_cls == CPU_WORKER_V1
    options = EngineOptions.from_config(config)
    assert options.drafter.block_size == 8
    assert (options.draft_width, options.free_drafts) == (7, True)
    assert not config.speculative_config.use_eagle_block_drop()


def test_an_engine_left_to_vllm_after_one_of_ours_has_vllms_draft_model(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, registry: dict[str, Any]
) -> None:
    before = registry[ARCHITECTURE]
    monkeypatch.setattr(registration, "_vllms_own", {})
    pair.start()
    assert registry[ARCHITECTURE] is not before
    pair.start(worker_cls="vllm.v1.worker.cpu_worker.CPUWorker")
    assert registry[ARCHITECTURE] is before


def test_what_a_user_sets_for_others_stays(pair: Pair) -> None:
    """`additional_config` is shared by all plugins of an engine."""
    mine = {"another_plugin": {"on": True}}
    written = pair.start(additional_config=mine).additional_config
    assert written.pop(ADDITIONAL_CONFIG_KEY)
    assert written == mine


@pytest.mark.parametrize(
    ("is_v2", "family", "written", "disabled"),
    [
        (False, "", None, True),
        (False, "", False, False),
        (False, "Qwen3Next", None, False),  # its states have a group of their own
        (True, "", None, False),
    ],
)
def test_v1_keeps_all_layers_in_one_group_of_the_cache(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    is_v2: bool,
    family: str,
    written: bool | None,
    disabled: bool,
) -> None:
    """Unless the user wants several. V2 accepts drafters in several."""
    monkeypatch.setattr("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", is_v2)
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", is_v2)
    pair = changed(pair, EngineCell(OURS, family=family), tmp_path)
    config = pair.start(disable_hybrid_kv_cache_manager=written)
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is disabled


def test_plain_serving_and_other_methods_are_untouched(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it checked what this vLLM has."""
    checks = "vllm_dflash.compatibility.vllm_unsupported_reason"
    monkeypatch.setattr(checks, lambda *_: pytest.fail("checked"))
    native = gpu_model_runner.DFlashProposer
    for asked in (None, {"method": "ngram", "num_speculative_tokens": 2}):
        config = pair.start(speculative_config=asked)
        assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
        assert ADDITIONAL_CONFIG_KEY not in config.additional_config
    assert gpu_model_runner.DFlashProposer is native


def test_a_second_config_of_the_same_arguments(pair: Pair) -> None:
    """It is what the first was, and a plain one is plain."""
    asked = {"method": "dflash", "model": str(pair.drafter), "draft_length": "fixed"}
    args = EngineArgs(
        model=str(pair.target), skip_tokenizer_init=True, speculative_config=dict(asked)
    )
    first, second = (args.create_engine_config() for _ in range(2))
    assert args.speculative_config == asked
    assert EngineOptions.from_config(first) == EngineOptions.from_config(second)
    assert EngineOptions.from_config(second).draft_length == "fixed"
    assert first.scheduler_config.scheduler_cls == second.scheduler_config.scheduler_cls
    args.speculative_config = None
    plain = args.create_engine_config()
    assert plain.scheduler_config.scheduler_cls is None
    assert not plain.scheduler_config.disable_hybrid_kv_cache_manager
    assert ADDITIONAL_CONFIG_KEY not in plain.additional_config


def test_registering_twice_wraps_once() -> None:
    plugin.register()
    wrapped = EngineArgs.create_speculative_config
    plugin.register()
    assert EngineArgs.create_speculative_config is wrapped
    assert not hasattr(wrapped.__wrapped__, "wrapped_by_vllm_dflash")


def test_another_plugins_wrapper_does_not_keep_us_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = EngineArgs.create_speculative_config.__wrapped__

    @functools.wraps(original)
    def foreign(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    monkeypatch.setattr(EngineArgs, "create_speculative_config", foreign)
    plugin.register()
    assert EngineArgs.create_speculative_config.wrapped_by_vllm_dflash


def test_the_plugin_module_imports_nothing_heavy() -> None:
    script = "import sys, vllm_dflash.plugin; print('torch' in sys.modules, 'vllm' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]


def test_a_worker_without_the_package_stops_by_name() -> None:
    script = (
        "import sys; sys.modules['vllm_dflash'] = None\n"
        "from vllm.utils.import_utils import resolve_obj_by_qualname\n"
        f"resolve_obj_by_qualname({CPU_WORKER_V1!r})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "vllm_dflash" in done.stderr.splitlines()[-1]


@pytest.fixture
def registry() -> Iterator[dict[str, Any]]:
    """vLLM's own models, which are restored afterwards."""
    before = dict(ModelRegistry.models)
    ModelRegistry.register_model(
        "DFlashDraftModel", "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM"
    )
    yield ModelRegistry.models
    ModelRegistry.models.clear()
    ModelRegistry.models.update(before)


def test_no_process_is_started_to_look_at_our_draft_model(
    pair: Pair, registry: dict[str, Any]
) -> None:
    """vLLM starts one for a model that it knows by path, which takes seconds of a first start."""
    config = pair.start()
    assert config.speculative_config is not None
    assert registry[ARCHITECTURE].load_model_cls() is DFlashDraftModel
    assert not hasattr(registry[ARCHITECTURE], "module_name")


def test_a_missing_front_door_is_said_and_all_is_vllms(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, registry: dict[str, Any]
) -> None:
    original = EngineArgs.create_speculative_config.__wrapped__
    with monkeypatch.context() as renamed, log_lines() as lines:
        renamed.delattr(EngineArgs, "create_speculative_config")
        plugin.register()
    (line,) = lines
    assert line.startswith("WARNING")
    assert "create_speculative_config" in line
    assert all(option in line for option in OWN_KEYS)
    # What vLLM starts if it had only renamed the function.
    monkeypatch.setattr(EngineArgs, "create_speculative_config", original)
    asked = {"method": "dflash", "model": str(pair.drafter), "num_speculative_tokens": 3}
    for one in (None, {"method": "ngram", "num_speculative_tokens": 2}, asked):
        config = pair.start(speculative_config=one)
        assert config.parallel_config.worker_cls != CPU_WORKER_V1
    assert registry[ARCHITECTURE].module_name.startswith("vllm.")


@pytest.mark.usefixtures("registry")
def test_no_fault_of_ours_stops_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is: all engines on this machine load the plugin."""

    def broken() -> None:
        raise KeyError("something else")

    monkeypatch.setattr(plugin, "_wrap_front_end", broken)
    with log_lines() as lines:
        plugin.register()
    assert "KeyError: 'something else'" in lines[0]


def test_options_are_parsed_once_in_a_process(pair: Pair) -> None:
    config = pair.start()
    options = EngineOptions.from_config(config)
    assert EngineOptions.from_config(config) is options
    assert EngineOptions.from_config(pickle.loads(pickle.dumps(config))) is options
    other_config = pair.start({"draft_length": "fixed"})
    assert EngineOptions.from_config(other_config).draft_length == "fixed"
    assert config.compute_hash() != other_config.compute_hash()


@pytest.mark.parametrize("additional", [{}, {"something": 1}, SimpleNamespace()])
def test_options_of_an_engine_that_did_not_select_us(additional: Any) -> None:
    message = "unset VLLM_PLUGINS or add 'dflash'"
    with pytest.raises(RuntimeError, match=message):
        EngineOptions.from_config(SimpleNamespace(additional_config=additional))


def test_remarks_on_a_config_are_warned_of(pair: Pair, tmp_path: Path) -> None:
    """An unread key is no reason to refuse a drafter that worked."""
    config = drafter_config(dflash_config={"mask_token": 300})
    drafter = tmp_path / "drafter"
    save_drafter(drafter, config)
    with log_lines() as lines:
        for _ in range(2):
            pair.start({"model": str(drafter)})
    warnings = [line for line in lines if line.startswith("WARNING")]
    assert warnings == [
        f"WARNING drafter '{drafter}': dflash_config has 'mask_token', which is ignored;"
        " did its author mean 'mask_token_id'?"
    ]
