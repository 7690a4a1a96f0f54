"""Tables of who runs an engine: ours, or vLLM's own DFlash as if ours were not installed.

No engine that vLLM starts by itself is refused because of us. Each cell of the tables is one
engine: a drafter, a target, and settings. vLLM creates its config as with `VLLM_PLUGINS=""`, and
with our hook: then as our engine, or as its own with a line in the log that says why.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import pytest
from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform

from support.faked_cuda import lines_on_cuda
from support.log_lines import log_lines
from support.pairs import Pair, as_speculators, drafter_config
from support.targets import write_config
from support.who_runs import (
    OURS,
    VLLMS,
    Cell,
    Settings,
    as_expected,
    ends,
    engine,
    outcome_alone,
    who_runs,
)
from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.config import left_to_vllm
from vllm_dflash.config.engine_options import (
    CPU_WORKER_V1,
    CPU_WORKER_V2,
    GPU_WORKER,
    runner_here,
    worker_here,
)
from vllm_dflash.config.left_to_vllm import (
    architecture_of_vllm,
    config_of_drafter,
    unsupported_reasons,
)
from vllm_dflash.vllms_own import OWN_KEYS

VLLMS_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
ON_MP = {"distributed_executor_backend": "mp"}
PIPELINE = "pipeline_parallel_size is 2"
CELLS: list[Cell] = [
    (OURS, "", {}, {}),
    (OURS, "", {"num_speculative_tokens": "3"}, {}),
    (OURS, "", {"num_speculative_tokens": 12}, {}),  # more than a block has
    (OURS, "", {"num_speculative_tokens_per_batch_size": [(1, 4, 7), (5, 64, 0)]}, {}),
    (OURS, "", {"draft_sample_method": "probabilistic"}, {}),
    (OURS, "", {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3}, {}),
    (OURS, "", {}, {"data_parallel_size": 2}),
    (OURS, "", {}, {"tensor_parallel_size": 2, **ON_MP}),
    (OURS, "", {}, {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}),
    (OURS, "", {}, {"enable_lora": True, "max_num_batched_tokens": 64, "max_num_seqs": 8}),
    (OURS, "", {}, {"enable_lora": True, "data_parallel_size": 2}),
    (VLLMS, PIPELINE, {}, {"pipeline_parallel_size": 2, **ON_MP}),
    (VLLMS, "worker_cls is", {}, {"worker_cls": VLLMS_WORKER}),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_settings(pair: Pair, cell: Cell) -> None:
    assert ends(pair, cell) == as_expected(cell)


ON_V1 = "this engine gets V1"
ON_CUDA: list[Cell] = [
    (OURS, "", {}, {}),
    (OURS, "", {"enable_adaptive_verification": True}, {}),
    (OURS, "", {"use_local_argmax_reduction": True}, {}),
    (OURS, "", {}, {"data_parallel_size": 2}),
    (OURS, "", {}, {"enable_lora": True}),
    (VLLMS, PIPELINE, {}, {"pipeline_parallel_size": 2}),
    (VLLMS, ON_V1, {}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    (VLLMS, ON_V1, {}, {"VLLM_USE_V2_MODEL_RUNNER": "0", "enable_lora": True}),
    (VLLMS, "--enable-dbo", {}, {"enable_dbo": True, "all2all_backend": "deepep_low_latency"}),
    (VLLMS, "worker_cls is", {}, {"worker_cls": "vllm.v1.worker.gpu_worker.Worker"}),
]


def test_settings_on_cuda() -> None:
    found = lines_on_cuda("support.who_runs", json.dumps(ON_CUDA))
    assert list(zip(ON_CUDA, found, strict=True)) == [(c, as_expected(c)) for c in ON_CUDA]


NO_TAPS, RUNS_IT = "use_aux_hidden_state false", ", which vLLM's own code runs"
MUSE = f"DFlashMuseGlimmerAssistantModel{RUNS_IT}"
DRAFTERS: list[tuple[str, str, Settings]] = [
    (OURS, "", {"block_size": None}),
    (OURS, "", {"vocab_size": 310}),  # the target has 320, which may be padding
    (OURS, "", {"max_position_embeddings": 64}),
    (VLLMS, NO_TAPS, {"dflash_config": {"use_aux_hidden_state": False}}),
    (VLLMS, NO_TAPS, {"use_aux_hidden_state": False}),
    (VLLMS, f"DFlashLagunaForCausalLM{RUNS_IT}", {"architectures": ["LagunaForCausalLM"]}),
    (VLLMS, f"DFlashLagunaForCausalLM{RUNS_IT}", {"architectures": ["DFlashLagunaForCausalLM"]}),
    (VLLMS, MUSE, {"architectures": ["MuseGlimmerAssistantModel"]}),
    (VLLMS, MUSE, {"architectures": ["DFlashMuseGlimmerAssistantModel"]}),
    (VLLMS, 'write "method": "dspark"', {"speculators_model_type": "dspark"}),
]


@pytest.mark.parametrize("method", ["dflash", None])
@pytest.mark.parametrize(("runs", "words", "changes"), DRAFTERS, ids=str)
def test_drafters(
    pair: Pair, tmp_path: Path, runs: str, words: str, changes: Settings, method: str | None
) -> None:
    """Also by name alone."""
    folder = tmp_path / "some-dflash"
    shutil.copytree(pair.drafter, folder)
    written = as_speculators(drafter_config()) if "speculators_model_type" in changes else {}
    written = {**written, **changes} if written else drafter_config(**changes)
    config = {key: value for key, value in written.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    asked = {"model": str(folder), "method": method, "num_speculative_tokens": 7}
    cell: Cell = (runs, words, asked, {})
    assert ends(pair, cell) == as_expected(cell)


OTHER_HYBRID, EXPERTS = "a hybrid without gated delta nets", "the target has experts"
TARGETS: list[tuple[str, str, str, Settings]] = [
    (VLLMS, OTHER_HYBRID, "NemotronH", {}),
    (OURS, "", "Qwen3Next", {}),
    (OURS, "", "Qwen3Moe", {}),
    (VLLMS, EXPERTS, "Qwen3Moe", {"data_parallel_size": 2}),
]


@pytest.mark.parametrize(("runs", "words", "family", "settings"), TARGETS, ids=str)
def test_targets(
    pair: Pair, tmp_path: Path, runs: str, words: str, family: str, settings: Settings
) -> None:
    write_config(tmp_path, family)
    cell: Cell = (runs, words, {}, {"model": str(tmp_path), **settings})
    assert ends(pair, cell) == as_expected(cell)


PLAIN: Settings = {"architectures": ["DFlashDraftModel"]}
PROBABILISTIC, FIXED = {"draft_sample_method": "probabilistic"}, {"draft_length": "fixed"}
TWO_RANKS: Settings = {"tensor_parallel_size": 2}
LAUNCHED: Settings = {**TWO_RANKS, "distributed_executor_backend": "external_launcher"}
MARKED: Settings = {"has_watermark": True}
NOT_HERE: list[tuple[str, str, Settings, Settings]] = [
    # Words of the reason, runner, settings of the speculative config, and of the engine.
    ("a watermark needs", "v1", PROBABILISTIC, MARKED),
    ("", "v1", {"draft_sample_method": "greedy"}, MARKED),  # no vLLM starts it
    ("", "v1", PROBABILISTIC, {}),
    ("", "v2", PROBABILISTIC, {}),
    ("rejection_sample_method is 'fly'", "v1", {"rejection_sample_method": "fly"}, {}),
    ("external_launcher", "v2", {}, LAUNCHED),
    ("", "v2", FIXED, LAUNCHED),
    ("", "v2", {**FIXED, "draft_window": 256}, LAUNCHED),
    ("", "v2", {}, {**LAUNCHED, "tensor_parallel_size": 1}),
    ("", "v1", {}, LAUNCHED),  # its ranks use the first rank's times
    ("", "v2", {}, TWO_RANKS),
    ("", "v1", {}, {"use_ubatching": True}),
]


def reasons(
    config: Settings,
    asked: Settings | None = None,
    *,
    has_watermark: bool = False,
    **changes: Any,
) -> list[str]:
    """Return reasons for an engine that is ours except for its drafter, settings that are asked
    for, and these changes to its parallel config."""
    target: Any = SimpleNamespace(
        model="target", is_moe=True, is_hybrid=False, is_multimodal_model=False
    )
    parallel: Any = SimpleNamespace(
        worker_cls="auto",
        pipeline_parallel_size=1,
        data_parallel_size=1,
        tensor_parallel_size=1,
        distributed_executor_backend="mp",
        use_ubatching=False,
    )
    vars(parallel).update(changes)
    requested = {**({"model": "it"} if config else {}), **(asked or {})}
    return unsupported_reasons(requested, config, target, parallel, has_watermark=has_watermark)


@pytest.mark.parametrize(("words", "runner", "asked", "settings"), NOT_HERE, ids=str)
def test_settings_that_no_vllm_has_here(
    monkeypatch: pytest.MonkeyPatch, words: str, runner: str, asked: Settings, settings: Settings
) -> None:
    """Another version of vLLM, or another way to start it."""
    monkeypatch.setattr(left_to_vllm, "runner_here", lambda: runner)
    found = reasons(PLAIN, asked, **settings)
    assert [words in reason for reason in found] == [True] * bool(words)


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (["DFlashDraftModel"], None),
        (["DFlash2DraftModel", "DFlashDraftModel"], None),
        (["LiLiCorrDraftModel"], None),
        (["2DraftModel"], None),  # known only with DFlash before its name
        (["DraftModel"], None),
        ([], None),
        (["DFlash2DraftModel", 3], None),
        (None, None),
        (["Qwen3XPressModel"], "DFlashQwen3XPressModel"),  # vLLM 0.33 runs these two
        (["DFlash2BeamDraftModel"], "DFlash2BeamDraftModel"),
    ],
)
@pytest.mark.parametrize("kind", [None, "dflash", "eagle3", "dspark"])
def test_architectures(
    monkeypatch: pytest.MonkeyPatch, config: Any, architecture: str | None, kind: str | None
) -> None:
    """`speculators_model_type` counts alone. vLLM 0.33's registry has each architecture under its
    own name and under a DFlash drafter's."""
    for name in ("Qwen3XPressModel", "DFlashQwen3XPressModel", "DFlash2BeamDraftModel"):
        monkeypatch.setitem(ModelRegistry.models, name, ModelRegistry.models["DFlashDraftModel"])
    of_kind = {None: architecture, "dspark": "Qwen3DSparkModel"}.get(kind)
    written = {"architectures": config, "speculators_model_type": kind}
    assert architecture_of_vllm(written) == of_kind


@pytest.mark.parametrize("model", [None, "", 3, ["a"]])
def test_without_a_drafter_there_is_no_config(model: Any) -> None:
    """A missing model is reported later, with the settings as a whole."""
    for requested in ({"method": "dflash", "model": model}, {"method": "dflash"}):
        assert config_of_drafter(requested) == {}
        assert reasons({}, requested) == []


def test_no_such_drafter(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match=r"this folder has no config\.json"):
        config_of_drafter({"model": str(tmp_path)})


def test_a_drafter_that_is_redirected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM_MODEL_REDIRECT_PATH maps names to folders; vLLM applies it to drafters as well."""
    (tmp_path / "config.json").write_text('{"architectures": ["LagunaForCausalLM"]}')
    redirect = {"some/drafter": str(tmp_path)}.get
    monkeypatch.setattr("vllm.transformers_utils.utils.maybe_model_redirect", redirect)
    assert config_of_drafter({"model": "some/drafter"})["architectures"] == ["LagunaForCausalLM"]


OWN = {
    "draft_length": "fixed",
    "drafter_overrides": {"sliding_window": 9},
    "free_drafts": "nonsense",
    "require": False,
    "draft-tree": 3,
    "draft_window": 64,
}


@pytest.mark.parametrize(
    "flags", [{}, {"spec_method": "dflash"}, {"spec_tokens": 3}, {"spec_model": "{drafter}"}]
)
def test_our_options_are_removed_for_vllm(pair: Pair, flags: dict[str, Any]) -> None:
    """The number of drafts is filled in, which vLLM requires and we do not."""
    flags = {name: str(pair.drafter) if name == "spec_model" else flags[name] for name in flags}
    asked = {"num_speculative_tokens": None, **OWN}
    asked |= {"method": None} if "spec_method" in flags else {}
    args = engine(pair, asked, {"worker_cls": VLLMS_WORKER, **flags})
    if "spec_model" in flags:  # all comes by flags
        args.speculative_config, args.spec_method = None, "dflash"
    with log_lines() as lines:
        config = args.create_engine_config()
    assert config.speculative_config.num_speculative_tokens == flags.get("spec_tokens", 7)
    (line,) = lines
    assert "worker_cls is" in line
    assert {name.replace("-", "_") for name in OWN} == {*OWN_KEYS}
    without = f", without {', '.join(map(repr, OWN_KEYS))}, which it does not know"
    assert line.endswith(f"runs this engine{'' if 'spec_model' in flags else without}.")


@pytest.fixture
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("is_v2", [None, True, False])
@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize("splits", [True, False])
def test_cuda_gets_its_own_worker_on_v2(
    monkeypatch: pytest.MonkeyPatch, is_v2: bool | None, has_triton: bool, splits: bool
) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", is_v2)
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", has_triton)
    assert worker_here() == GPU_WORKER
    if is_v2 or (is_v2 is None and has_triton and not splits):
        assert runner_here() == "v2"
        assert reasons(PLAIN, use_ubatching=splits) == []
        assert reasons(PLAIN, worker_cls=GPU_WORKER, use_ubatching=splits) == []
        (reason,) = reasons(PLAIN, worker_cls=CPU_WORKER_V1, use_ubatching=splits)
        assert "worker_cls is" in reason
    else:
        (reason,) = reasons(PLAIN, use_ubatching=splits)
        assert ON_V1 in reason
        assert ("--enable-dbo" in reason) == (splits and is_v2 is None)


@pytest.mark.parametrize(
    ("is_v2", "has_triton", "runner", "worker"),
    [
        (None, False, "v1", CPU_WORKER_V1),
        (None, True, "v2", CPU_WORKER_V2),  # also on a CPU: vLLM's own choice
        (False, True, "v1", CPU_WORKER_V1),
        (True, False, "v2", CPU_WORKER_V2),
    ],
)
def test_a_cpu_has_a_worker_for_each_runner(
    monkeypatch: pytest.MonkeyPatch, is_v2: bool | None, has_triton: bool, runner: str, worker: str
) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", is_v2)
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", has_triton)
    assert (runner_here(), worker_here()) == (runner, worker)
    assert reasons(PLAIN) == reasons(PLAIN, worker_cls=worker) == []
    assert "worker_cls is" in reasons(PLAIN, worker_cls=GPU_WORKER)[0]


def test_other_platforms_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    (reason,) = reasons(PLAIN, worker_cls="mine.Worker")
    assert "CPU and CUDA platforms" in reason


def other_values(kind: Any, default: Any) -> Iterator[Any]:
    """Yield some values of a field of this type other than its default."""
    if kind is bool:
        yield not default
    elif kind is int:
        yield from (1, 2, 4)
    elif get_origin(kind) is Literal:
        yield from (value for value in get_args(kind) if value != default)
    else:  # a union
        for each in get_args(kind):
            yield from other_values(each, default)


def cells_of(kind: Any, *left_out: str) -> list[Settings]:
    """Return a cell for each value of each field of one of vLLM's dataclasses."""
    cells: list[Settings] = []
    for field in dataclasses.fields(kind):
        default = None if field.default is dataclasses.MISSING else field.default
        if field.name not in left_out:
            cells += [{field.name: value} for value in other_values(field.type, default)]
    return cells


def not_ours(pair: Pair, cells: list[tuple[Settings, Settings]], least: int) -> dict[str, str]:
    """Return who runs those cells that vLLM starts by itself, where it is not us."""
    alone = [(cell, outcome_alone(pair, *cell)) for cell in cells]
    started = [(cell, outcome) for cell, outcome in alone if "error" not in outcome]
    assert len(started) > least
    found = {str(cell): who_runs(pair, *cell, outcome)[0] for cell, outcome in started}
    return {cell: end for cell, end in found.items() if end != OURS}


@pytest.mark.slow
def test_every_field_of_vllms_speculative_config(pair: Pair) -> None:
    cells: list[tuple[Settings, Settings]] = [
        (one, {}) for one in cells_of(SpeculativeConfig, "method", "model", "quantization")
    ]
    fly = {str(cell): VLLMS for cell in cells if cell[0] == {"rejection_sample_method": "fly"}}
    assert not_ours(pair, cells, 20) == fly  # from 0.33 on


PARTS = 8
"""Parts of a test that would otherwise end minutes after all others."""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_field_of_an_engine(pair: Pair, part: int) -> None:
    # vLLM's configs accept Ray, but the engine's process refuses it: no CPUs.
    every = cells_of(EngineArgs, "model", "skip_tokenizer_init")
    cells: list[tuple[Settings, Settings]] = [
        ({}, one) for one in every if one != {"distributed_executor_backend": "ray"}
    ]
    found = not_ours(pair, cells[part::PARTS], 200 // PARTS)
    pipelines = [{"pipeline_parallel_size": count} for count in (2, 4)]
    assert found == {str(({}, p)): VLLMS for p in pipelines if ({}, p) in cells[part::PARTS]}
