"""Settings and configs become checked options, and what is read from vLLM's own configs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.platforms import current_platform

from support.log_lines import log_lines
from support.pairs import drafter_config, save_drafter
from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.config.engine_options import MOST_FREE_DRAFTS, EngineOptions, from_json
from vllm_dflash.config.pair import resolve
from vllm_dflash.config.speculative_settings import SpeculativeSettings

LORA = {"enable_lora": True, "max_num_batched_tokens": 2048, "max_num_seqs": 128}


def engine(**changes: Any) -> Any:
    """Return the engine arguments that are read."""
    plain = dict.fromkeys(["scheduler_cls", "max_num_batched_tokens", "max_num_active_seqs"])
    plain |= {"max_num_seqs": None, "enable_lora": False, "load_format": "auto"}
    return SimpleNamespace(**{**plain, **changes})


def target(model_class: type = Qwen3ForCausalLM, **facts: Any) -> Any:
    """Return vLLM's config of a target: 4 layers, 64 wide, 320 tokens."""
    config = SimpleNamespace(
        model="target",
        architecture="Resolved",
        architectures=["Written"],
        is_hybrid=False,
        max_model_len=256,
        get_total_num_hidden_layers=lambda: 4,
        get_hidden_size=lambda: 64,
        get_vocab_size=lambda: 320,
        hf_text_config=SimpleNamespace(rope_parameters={"rope_theta": 1e4}),
    )

    found = SimpleNamespace(model_cls=model_class)
    config.registry = SimpleNamespace(models={config.architecture: found})
    vars(config).update(facts)
    return config


def parallel(tensor: int = 1, data: int = 1) -> Any:
    return SimpleNamespace(
        tensor_parallel_size=tensor,
        data_parallel_size=data,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
    )


def resolved(
    drafter: Path | str,
    own: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    *,
    to: Any = None,
    ranks: Any = None,
    **asked: Any,
) -> EngineOptions:
    """Resolve settings of our own, for a drafter with these changes of its config, a target, ranks,
    and the engine's settings that are asked for."""
    settings = SpeculativeSettings.from_config({"model": str(drafter), **(own or {})})
    written = drafter_config(**(config or {}))
    return resolve(settings, written, to or target(), engine(**asked), ranks or parallel())


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    save_drafter(tmp_path / "drafter", drafter_config())
    return tmp_path / "drafter"


@pytest.mark.parametrize("own", [{}, {"draft_load_config": {"load_format": "dummy"}}])
def test_a_drafter_with_made_up_weights_needs_no_files(drafter: Path, own: dict[str, Any]) -> None:
    for file in drafter.glob("*.safetensors"):
        file.unlink()
    load_format = "auto" if own else "dummy"
    assert resolved(drafter, own, load_format=load_format).draft_width == 7
    read = {"draft_load_config": {"load_format": "auto"}}
    with pytest.raises(DrafterError, match="safetensors"):
        resolved(drafter, read, load_format=load_format)


class Case(NamedTuple):
    """Settings of an engine, and options that follow from them."""

    expected: dict[str, Any]
    own: dict[str, Any] = {}  # noqa: RUF012 - not changed
    asked: dict[str, Any] = {}  # noqa: RUF012
    facts: dict[str, Any] = {}  # noqa: RUF012
    """What the target is."""
    is_v2: bool = False
    on_cuda: bool = False
    data_ranks: int = 1


def room(most: int, width: int = 7, *, free_drafts: bool = True) -> dict[str, Any]:
    return {"num_speculative_tokens": most, "draft_width": width, "free_drafts": free_drafts}


def tree(nodes: int, most: int, width: int = 7) -> dict[str, Any]:
    return {"tree_nodes": nodes, "num_speculative_tokens": most, "draft_width": width}


HYBRID = {"is_hybrid": True, "architecture": "Qwen3NextForCausalLM"}
MAMBA = {"is_hybrid": True, "architecture": "NemotronHForCausalLM"}
OFF, FIXED = {"free_drafts": "off"}, {"draft_length": "fixed"}
USERS = {"scheduler_cls": "mine.Scheduler"}
CASES = [
    # Free drafts may be longer than blocks.
    Case(room(MOST_FREE_DRAFTS)),
    Case(room(MOST_FREE_DRAFTS), asked={"max_num_batched_tokens": MOST_FREE_DRAFTS + 1}),
    Case(room(7), asked={"max_num_batched_tokens": MOST_FREE_DRAFTS}),
    # vLLM makes steps no larger than this.
    Case(room(7), asked={"max_num_seqs": 1}, facts={"max_model_len": MOST_FREE_DRAFTS}),
    # A number of drafts that was asked for limits free drafts as well.
    Case(room(3, 3), {"num_speculative_tokens": 3}),
    Case(room(1, 1), {"num_speculative_tokens": 1}),
    Case(room(7, free_drafts=False), OFF),
    Case(room(7, free_drafts=False), FIXED),
    Case(room(7), facts=HYBRID),  # every draft would take the memory of a state
    Case(room(7, free_drafts=False), OFF, facts=HYBRID),
    Case(room(7), is_v2=True),  # free drafts are at most one block
    Case(room(7), asked=LORA),  # vLLM needs rows for all drafts of all requests
    Case(room(7), asked=USERS),  # it would reserve that for each request
    Case({"runner": "v1", "draws_drafts": False, "tree_nodes": 0}),
    # Drafts are chains unless trees are asked for.
    Case({"runner": "v2", "draws_drafts": True, "tree_nodes": 0}, is_v2=True),
    Case({"draws_drafts": False}, {"draft_sample_method": "greedy"}, is_v2=True),
    # A number of nodes is room for a tree on V2.
    Case(tree(32, 32), {"draft_tree": 32}, is_v2=True),
    Case(tree(4, 7), {"draft_tree": 4}, is_v2=True),  # a chain has more
    Case(tree(31, 31), {"draft_tree": "auto"}, is_v2=True),
    Case(tree(16, 16, 3), {"draft_tree": 16, **FIXED, "num_speculative_tokens": 3}, is_v2=True),
    Case(tree(0, 32), {"draft_tree": 32}),  # free drafts
    Case(tree(0, 7), {"draft_tree": 32}, USERS, is_v2=True),
    Case(tree(0, 7), {"draft_tree": 32}, LORA, is_v2=True),
    Case(tree(0, 7), {"draft_tree": 32}, facts=HYBRID, is_v2=True),
    # Graphs for a few lengths where a scheduler of ours chooses among them.
    Case({"captures_lengths": True}, on_cuda=True),
    Case({"captures_lengths": False}, FIXED, on_cuda=True),
    Case({"captures_lengths": False}, asked=USERS, on_cuda=True),
    Case({"captures_lengths": False}, on_cuda=True, data_ranks=2),  # vLLM drops the table
    Case({"captures_lengths": False}),  # there are no graphs
    Case({"captures_lengths": True}, facts=HYBRID, on_cuda=True),
    Case({"captures_lengths": False}, facts=MAMBA, on_cuda=True),  # only full lengths
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_options_that_follow_from_settings(
    monkeypatch: pytest.MonkeyPatch, drafter: Path, case: Case
) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", case.is_v2)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: case.on_cuda)
    if case.facts:  # linear attention
        monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    ranks = parallel(data=case.data_ranks)
    options = resolved(drafter, case.own, to=target(**case.facts), ranks=ranks, **case.asked)
    assert {name: getattr(options, name) for name in case.expected} == case.expected
    assert from_json(options.to_json()) == options


def test_a_block_longer_than_the_most_free_drafts_has_its_room(tmp_path: Path) -> None:
    width = MOST_FREE_DRAFTS + 3
    config = {"block_size": 1 + width}
    save_drafter(tmp_path / "drafter", drafter_config(**config))
    options = resolved(tmp_path / "drafter", config=config)
    assert (options.num_speculative_tokens, options.draft_width) == (width, width)


@pytest.mark.parametrize(
    ("rows", "length", "asked", "width", "words"),
    [
        (
            8192,
            4096,
            None,
            127,
            "8192 rows (max_num_batched_tokens) for 64 requests (max_num_seqs)",
        ),
        (2048, 4096, None, 64, "num_speculative_tokens in the speculative config sets another"),
        (1 << 16, 4096, None, 1023, ""),
        (2048, 4096, 1023, 1023, ""),  # the user's choice
        (2048, 4096, 500, 500, ""),
        (2048, 512, 1023, 510, "drafts have up to 510 tokens, not 1023: max_model_len is 512."),
        (1 << 16, 600, None, 598, "max_model_len is 600"),
        (2048, 32, None, 30, "max_model_len is 32"),
    ],
)
def test_a_huge_block_is_bounded_by_what_fits(
    tmp_path: Path, rows: int, length: int, asked: int | None, width: int, words: str
) -> None:
    config = {"block_size": 1024}
    save_drafter(tmp_path / "drafter", drafter_config(**config))

    def fill_in(*_: object) -> None:
        """vLLM's defaults: both numbers are set here."""

    arguments = engine(
        max_num_batched_tokens=rows,
        max_num_seqs=64,
        _set_default_max_num_seqs_and_batched_tokens_args=fill_in,
    )
    settings = SpeculativeSettings.from_config(
        {"method": "dflash", "model": str(tmp_path / "drafter"), "num_speculative_tokens": asked}
    )
    written = json.loads((tmp_path / "drafter/config.json").read_text())
    with log_lines() as lines:
        options = resolve(settings, written, target(max_model_len=length), arguments, parallel())
    assert options.draft_width == width
    assert len(lines) == bool(words)
    assert words in "".join(lines)


def test_the_window_reaches_the_engine(drafter: Path) -> None:
    options = resolved(drafter, {"draft_window": 12})
    assert from_json(options.to_json()) == options
    assert options.drafter.draft_window == 12


@pytest.mark.parametrize(
    ("asked", "width"),
    [
        (5, 5),
        (1023, 254),  # max_model_len is 256
        (1024, "has no block_size, so it would be 1 [+] num_speculative_tokens, which is 1024"),
    ],
)
def test_a_block_size_that_the_config_lacks(drafter: Path, asked: int, width: int | str) -> None:
    own, config = {"num_speculative_tokens": asked}, {"block_size": None}
    if isinstance(width, str):
        with pytest.raises(DrafterError, match=width):
            resolved(drafter, own, config)
        return
    options = resolved(drafter, own, config)
    assert (options.draft_width, options.drafter.block_size) == (width, 1 + asked)


def test_the_users_number_of_ranks_is_heeded(drafter: Path) -> None:
    ranks = parallel(tensor=2)
    assert resolved(drafter, ranks=ranks).drafter_ranks == 2
    assert resolved(drafter, {"draft_tensor_parallel_size": 1}, ranks=ranks).drafter_ranks == 1
