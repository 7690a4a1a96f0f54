"""No engine that vLLM starts by itself is refused because vllm-dflash is installed.

Each cell is one engine: a drafter, a target, and settings. vLLM creates its config twice: as with
`VLLM_PLUGINS=""`, and with our hook. If the first succeeds, the second must too: as our engine, or
as vLLM's own with a line in the log. The cells come from vLLM's own fields, and from what its code
for this method reads.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs

from support.faked_cuda import lines_on_cuda
from support.pairs import Pair, drafter_config
from support.targets import write_config
from support.who_runs import OURS, VLLMS, Cell, Settings, ends, starts_alone, who_runs


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


@pytest.mark.slow
def test_every_field_of_vllms_speculative_config(pair: Pair) -> None:
    cells = cells_of(SpeculativeConfig, "method", "model", "quantization")
    started = [cell for cell in cells if starts_alone(pair, cell, {})]
    assert len(started) > 20
    found = {str(cell): who_runs(pair, cell, {}) for cell in started}
    fly = {str(cell): VLLMS for cell in started if cell == {"rejection_sample_method": "fly"}}
    assert {cell: end for cell, end in found.items() if end != OURS} == fly  # from 0.33 on


PARTS = 8
"""Parts of a test that would otherwise end minutes after all others."""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_field_of_an_engine(pair: Pair, part: int) -> None:
    cells = [
        cell
        for cell in cells_of(EngineArgs, "model", "skip_tokenizer_init")
        # vLLM's configs accept it, but the engine's process refuses it: no CPUs.
        if cell != {"distributed_executor_backend": "ray"}
    ]
    started = [cell for cell in cells[part::PARTS] if starts_alone(pair, {}, cell)]
    assert len(started) > 200 // PARTS
    found = {str(cell): who_runs(pair, {}, cell) for cell in started}
    pipelines = {str(cell): VLLMS for cell in started if "pipeline_parallel_size" in cell}
    pipelines.pop("{'pipeline_parallel_size': 1}", None)
    assert {cell: end for cell, end in found.items() if end != OURS} == pipelines


ON_MP = {"distributed_executor_backend": "mp"}
CELLS: list[Cell] = [
    (OURS, {}, {}),
    (OURS, {"num_speculative_tokens": "3"}, {}),
    (OURS, {"num_speculative_tokens": 12}, {}),  # more than a block has
    (OURS, {"num_speculative_tokens_per_batch_size": [(1, 4, 7), (5, 64, 0)]}, {}),
    (OURS, {"draft_sample_method": "probabilistic"}, {}),
    (OURS, {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3}, {}),
    (OURS, {}, {"data_parallel_size": 2}),
    (OURS, {}, {"tensor_parallel_size": 2, **ON_MP}),
    (OURS, {}, {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}),
    (OURS, {}, {"enable_lora": True, "max_num_batched_tokens": 64, "max_num_seqs": 8}),
    (OURS, {}, {"enable_lora": True, "data_parallel_size": 2}),
    (VLLMS, {}, {"pipeline_parallel_size": 2, **ON_MP}),
    (VLLMS, {}, {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}),
]


def as_expected(cell: Cell) -> dict[str, Any]:
    return {"alone": True, "with us": cell[0], "with keys of ours": cell[0]}


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_settings(pair: Pair, cell: Cell) -> None:
    assert ends(pair, cell) == as_expected(cell)


ON_CUDA: list[Cell] = [
    (OURS, {}, {}),
    (OURS, {"enable_adaptive_verification": True}, {}),
    (OURS, {"use_local_argmax_reduction": True}, {}),
    (OURS, {}, {"data_parallel_size": 2}),
    (OURS, {}, {"enable_lora": True}),
    (VLLMS, {}, {"pipeline_parallel_size": 2}),
    (VLLMS, {}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    (VLLMS, {}, {"VLLM_USE_V2_MODEL_RUNNER": "0", "enable_lora": True}),
    (VLLMS, {}, {"enable_dbo": True, "all2all_backend": "deepep_low_latency"}),
    (VLLMS, {}, {"worker_cls": "vllm.v1.worker.gpu_worker.Worker"}),
]


def test_settings_on_cuda() -> None:
    found = lines_on_cuda("support.who_runs", json.dumps(ON_CUDA))
    assert [{**line, "cell": cell} for cell, line in zip(ON_CUDA, found, strict=True)] == [
        {**as_expected(cell), "cell": cell} for cell in ON_CUDA
    ]


DRAFTERS: list[tuple[str, Settings]] = [
    (OURS, {"block_size": None}),
    (OURS, {"vocab_size": 310}),  # the target has 320, which may be padding
    (OURS, {"max_position_embeddings": 64}),
    (VLLMS, {"dflash_config": {"use_aux_hidden_state": False}}),
    (VLLMS, {"use_aux_hidden_state": False}),
    (VLLMS, {"architectures": ["LagunaForCausalLM"]}),
]


@pytest.mark.parametrize(("runs", "changes"), DRAFTERS, ids=str)
def test_drafters(pair: Pair, tmp_path: Path, runs: str, changes: Settings) -> None:
    shutil.copytree(pair.drafter, tmp_path, dirs_exist_ok=True)
    config = {key: value for key, value in drafter_config(**changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = {"model": str(tmp_path)}
    assert starts_alone(pair, asked, {})
    assert who_runs(pair, asked, {}) == runs
    assert who_runs(pair, {**asked, "draft_length": "fixed"}, {}) == runs


TARGETS: list[tuple[str, str, Settings]] = [
    (VLLMS, "NemotronH", {}),  # its state is not a gated delta net's
    (OURS, "Qwen3Next", {}),
    (OURS, "Qwen3Moe", {}),
    (VLLMS, "Qwen3Moe", {"data_parallel_size": 2}),
]


@pytest.mark.parametrize(("runs", "family", "settings"), TARGETS, ids=str)
def test_targets(pair: Pair, tmp_path: Path, runs: str, family: str, settings: Settings) -> None:
    write_config(tmp_path, family)
    cell: Cell = (runs, {}, {"model": str(tmp_path), **settings})
    assert ends(pair, cell) == as_expected(cell)
