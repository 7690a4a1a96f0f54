"""One table of who runs an engine: ours, or vLLM's own DFlash as if ours were not installed.

No engine that vLLM starts by itself is refused because of us. Each cell of the table is one engine:
a drafter, a target, and settings. vLLM creates its config as with `VLLM_PLUGINS=""`, and with our
hook: then as our engine, or as its own with a line in the log that says why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields, replace
from typing import Any, Literal, get_args, get_origin

import pytest
from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs

from support.faked_cuda import lines_on_cuda
from support.log_lines import log_lines
from support.pairs import Pair
from support.who_runs import (
    OURS,
    VLLMS,
    EngineCell,
    Settings,
    ends,
    engine,
    outcome,
    who_runs,
)
from vllm_dflash.vllms_own import OWN_KEYS

VLLMS_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
ON_V1, PIPELINE = "this engine gets V1", "pipeline_parallel_size is 2"
TWO_STAGES: Settings = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
LORA: Settings = {"enable_lora": True, "max_num_batched_tokens": 64, "max_num_seqs": 8}
NO_TAPS: Settings = {"use_aux_hidden_state": False}
MUSE, LAGUNA = "DFlashMuseGlimmerAssistantModel", "DFlashLagunaForCausalLM"


class Hashable:
    """What vLLM allows as `additional_config`, beside a dict."""

    def compute_hash(self) -> str:
        return "mine"


DRAFTERS = [
    EngineCell(OURS, speculative={"num_speculative_tokens": 7}, drafter={"block_size": None}),
    EngineCell(OURS, drafter={"vocab_size": 310}),  # the target has 320, which may be padding
    EngineCell(OURS, drafter={"max_position_embeddings": 64}),
    EngineCell(VLLMS, "use_aux_hidden_state false", drafter={"dflash_config": NO_TAPS}),
    EngineCell(VLLMS, "use_aux_hidden_state false", drafter=NO_TAPS),
    *(
        EngineCell(
            VLLMS, f"{name}, which vLLM's own code runs", drafter={"architectures": [written]}
        )
        for name in (MUSE, LAGUNA)
        for written in (name, name.removeprefix("DFlash"))
    ),
    EngineCell(VLLMS, 'write "method": "dspark"', drafter={"speculators_model_type": "dspark"}),
]
CELLS = [
    EngineCell(OURS),
    EngineCell(OURS, speculative={"num_speculative_tokens": "3"}),
    EngineCell(OURS, speculative={"num_speculative_tokens": 12}),  # more than a block has
    EngineCell(
        OURS, speculative={"num_speculative_tokens_per_batch_size": [(1, 4, 7), (5, 64, 0)]}
    ),
    EngineCell(OURS, speculative={"draft_sample_method": "probabilistic"}),
    EngineCell(
        OURS,
        speculative={"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3},
    ),
    EngineCell(OURS, settings={"data_parallel_size": 2}),
    EngineCell(
        OURS, settings={**TWO_STAGES, "pipeline_parallel_size": 1, "tensor_parallel_size": 2}
    ),
    EngineCell(OURS, settings={"scheduler_cls": SCHEDULER}),
    EngineCell(OURS, settings=LORA),
    EngineCell(OURS, settings={"enable_lora": True, "data_parallel_size": 2}),
    EngineCell(VLLMS, PIPELINE, settings=TWO_STAGES),
    EngineCell(VLLMS, "worker_cls is", settings={"worker_cls": VLLMS_WORKER}),
    EngineCell(VLLMS, "additional_config is no dict", settings={"additional_config": Hashable()}),
    *DRAFTERS,
    # By name alone.
    *(replace(each, speculative={**each.speculative, "method": None}) for each in DRAFTERS),
    EngineCell(VLLMS, "a hybrid without gated delta nets", family="NemotronH"),
    EngineCell(OURS, family="Qwen3Next"),
    EngineCell(OURS, family="Qwen3Moe"),
    EngineCell(
        VLLMS, "the target has experts", settings={"data_parallel_size": 2}, family="Qwen3Moe"
    ),
]
ON_CUDA = [
    EngineCell(OURS),
    EngineCell(OURS, speculative={"enable_adaptive_verification": True}),
    EngineCell(OURS, speculative={"use_local_argmax_reduction": True}),
    EngineCell(OURS, settings={"data_parallel_size": 2}),
    EngineCell(OURS, settings={"enable_lora": True}),
    EngineCell(VLLMS, PIPELINE, settings={"pipeline_parallel_size": 2}),
    EngineCell(VLLMS, ON_V1, settings={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    EngineCell(VLLMS, ON_V1, settings={"VLLM_USE_V2_MODEL_RUNNER": "0", "enable_lora": True}),
    EngineCell(
        VLLMS,
        "--enable-dbo",
        settings={"enable_dbo": True, "all2all_backend": "deepep_low_latency"},
    ),
    EngineCell(VLLMS, "worker_cls is", settings={"worker_cls": "vllm.v1.worker.gpu_worker.Worker"}),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_who_runs(pair: Pair, cell: EngineCell) -> None:
    assert ends(pair, cell) == (cell.runs, cell.runs, cell.words)


def test_who_runs_on_cuda() -> None:
    found = lines_on_cuda("support.who_runs", json.dumps([asdict(cell) for cell in ON_CUDA]))
    expected = [{"ends": [cell.runs, cell.runs, cell.words]} for cell in ON_CUDA]
    assert list(zip(ON_CUDA, found, strict=True)) == list(zip(ON_CUDA, expected, strict=True))


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
    for field in fields(kind):
        default = None if field.default is MISSING else field.default
        if field.name not in left_out:
            cells += [{field.name: value} for value in other_values(field.type, default)]
    return cells


def not_ours(pair: Pair, cells: list[tuple[Settings, Settings]], least: int) -> dict[str, str]:
    """Return who runs those cells that vLLM starts by itself, where it is not us."""
    alone = [(cell, outcome(pair, *cell, alone=True)) for cell in cells]
    started = [(cell, result) for cell, result in alone if "error" not in result]
    assert len(started) > least
    found = {str(cell): who_runs(pair, *cell, result)[0] for cell, result in started}
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
