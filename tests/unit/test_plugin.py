"""Activation: what is hooked, when, and that a changed vLLM is refused by name."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker import gpu_model_runner

import vllm_dflash
from support.pairs import Pair, make_pair
from vllm_dflash import plugin, seams
from vllm_dflash.config.class_paths import CPU_WORKER
from vllm_dflash.config.options import ADDITIONAL_CONFIG_KEY, DFlashOptions


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(Path(tmp_path_factory.mktemp("pair")))


def engine_args(pair: Pair, **changes: Any) -> EngineArgs:
    fields = {"model": str(pair.target), "skip_tokenizer_init": True, "dtype": "float32"}
    return EngineArgs(**fields | changes)


def speculative(pair: Pair, **changes: Any) -> dict[str, Any]:
    return {"method": "dflash", "model": str(pair.drafter), **changes}


def test_selection_fills_in_what_the_checkpoint_says(pair: Pair) -> None:
    config = engine_args(pair, speculative_config=speculative(pair)).create_engine_config()
    assert config.speculative_config.num_speculative_tokens == 7
    assert config.parallel_config.worker_cls == CPU_WORKER
    assert DFlashOptions.of(config).drafter.block_size == 8
    assert not config.speculative_config.use_eagle_block_drop()


def test_fewer_drafts_than_the_block_holds(pair: Pair) -> None:
    asked = speculative(pair, num_speculative_tokens=3)
    config = engine_args(pair, speculative_config=asked).create_engine_config()
    assert config.speculative_config.num_speculative_tokens == 3


def test_the_separate_flags_select_it_too(pair: Pair) -> None:
    args = engine_args(pair, spec_method="dflash", spec_model=str(pair.drafter), spec_tokens=4)
    config = args.create_engine_config()
    assert config.parallel_config.worker_cls == CPU_WORKER
    assert config.speculative_config.num_speculative_tokens == 4


def test_a_name_with_dflash_in_it_selects_it_without_a_method(pair: Pair, tmp_path: Path) -> None:
    named = tmp_path / "my-dflash-drafter"
    named.symlink_to(pair.drafter)
    args = engine_args(pair, speculative_config={"model": str(named)})
    assert args.create_engine_config().parallel_config.worker_cls == CPU_WORKER


def test_dashes_in_option_names(pair: Pair) -> None:
    options = {"num-speculative-tokens": 2, "disable-eagle-block-drop": False}
    asked = speculative(pair, **options)
    config = engine_args(pair, speculative_config=asked).create_engine_config()
    assert config.speculative_config.num_speculative_tokens == 2
    assert config.speculative_config.use_eagle_block_drop()


def test_sampled_drafts_are_overruled_with_a_warning(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned = []
    monkeypatch.setattr(
        "vllm_dflash.config.engine_settings.warn_about_sampling", lambda: warned.append(True)
    )
    asked = speculative(pair, **{"draft-sample-method": "probabilistic"})
    config = engine_args(pair, speculative_config=asked).create_engine_config()
    assert warned == [True]
    assert config.speculative_config.draft_sample_method == "greedy"


def test_plain_serving_and_other_methods_are_untouched(pair: Pair) -> None:
    native = gpu_model_runner.DFlashProposer
    for asked in (None, {"method": "ngram", "num_speculative_tokens": 2}):
        config = engine_args(pair, speculative_config=asked).create_engine_config()
        assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
        assert ADDITIONAL_CONFIG_KEY not in config.additional_config
    assert gpu_model_runner.DFlashProposer is native


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


@pytest.mark.parametrize(("plugins", "ours"), [(None, "True"), ("dflash", "True"), ("", "False")])
def test_vllm_plugins_keeps_its_meaning(plugins: str | None, ours: str) -> None:
    script = (
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "print(hasattr(EngineArgs.create_speculative_config, 'wrapped_by_vllm_dflash'))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == ours


def test_the_plugin_module_imports_nothing_heavy() -> None:
    script = "import sys, vllm_dflash.plugin; print('torch' in sys.modules, 'vllm' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]


def test_a_vllm_outside_the_range_is_refused_by_version(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.33.1+cpu")
    args = engine_args(pair, speculative_config=speculative(pair))
    message = rf"vllm-dflash {vllm_dflash.__version__} supports vLLM .*this is vLLM 0\.33\.1\+cpu"
    with pytest.raises(seams.UnsupportedVllmError, match=message):
        args.create_engine_config()
    engine_args(pair).create_engine_config()  # plain serving does not care


def test_a_vllm_without_a_version_is_refused() -> None:
    with pytest.raises(seams.UnsupportedVllmError, match="this is vLLM dev"):
        seams.check_version("dev")


def test_a_worker_without_the_package_stops_by_name() -> None:
    script = (
        "import sys; sys.modules['vllm_dflash'] = None\n"
        "from vllm.utils.import_utils import resolve_obj_by_qualname\n"
        f"resolve_obj_by_qualname({CPU_WORKER!r})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "vllm_dflash" in done.stderr.splitlines()[-1]


def test_a_changed_signature_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    def propose(self: object, something: int, else_: int) -> None: ...

    monkeypatch.setattr(SpecDecodeBaseProposer, "propose", propose)
    with pytest.raises(
        seams.UnsupportedVllmError, match=r"propose\(self, num_.*has propose\(self, something"
    ):
        seams.check_seams(seams.V1_WORKER)


def test_a_missing_function_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(gpu_model_runner.GPUModelRunner, "_input_fits_in_drafter")
    with pytest.raises(seams.UnsupportedVllmError, match="_input_fits_in_drafter"):
        seams.check_seams(seams.V1_WORKER)


def test_a_missing_front_door_stops_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(EngineArgs, "create_speculative_config")
    with pytest.raises(seams.UnsupportedVllmError, match="create_speculative_config"):
        plugin.register()


def test_a_runner_with_another_drafter_is_refused() -> None:
    from types import SimpleNamespace

    with pytest.raises(RuntimeError, match="SimpleNamespace as its drafter"):
        plugin.attach_to_v1_runner(SimpleNamespace(drafter=SimpleNamespace()), object)


def test_this_vllm_has_every_seam() -> None:
    seams.check_seams(seams.FRONT_END + seams.V1_WORKER + seams.V2_WORKER + seams.ENGINE)


def test_a_changed_v2_signature_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    def propose(self: object, batch: int) -> None: ...

    monkeypatch.setattr(DFlashSpeculator, "propose", propose)
    with pytest.raises(
        seams.UnsupportedVllmError, match=r"speculator:DFlashSpeculator.propose.*has propose"
    ):
        plugin.install_v2_speculator()
