"""Settings and configs become checked options, and what is read from vLLM's own configs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.platforms import current_platform

from support.log_lines import log_lines
from support.pairs import drafter_config, save_drafter
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.config.engine_options import MOST_FREE_DRAFTS, EngineOptions, from_json
from vllm_dflash.config.pair import check_weights, resolve
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


@pytest.mark.parametrize(
    ("own", "tensor", "expected"),
    [
        ({}, 1, (7, "adaptive", 1)),
        ({"draft_length": "fixed"}, 2, (7, "fixed", 2)),
        ({"num_speculative_tokens": 3}, 4, (3, "adaptive", 4)),
        ({"draft_tensor_parallel_size": 1}, 2, (7, "adaptive", 1)),
        ({}, 3, (7, "adaptive", 1)),  # does not divide
    ],
)
@pytest.mark.parametrize("is_folder", [True, False])
def test_options_of_a_pair_that_fits(
    drafter: Path, own: dict[str, Any], tensor: int, expected: tuple[Any, ...], is_folder: bool
) -> None:
    """Weights of a repository are checked while they are loaded."""
    model = str(drafter) if is_folder else "someone/drafter"
    options = resolved(model, own, ranks=parallel(tensor))
    count, length, ranks = expected
    spec, free_drafts = parse_config(model, drafter_config()), length == "adaptive"
    # A number of drafts that was asked for is the limit.
    room = MOST_FREE_DRAFTS if free_drafts and count == 7 else count
    most_free = room if free_drafts else 0
    assert options == EngineOptions(room, count, length, spec, ranks, most_free=most_free)


@pytest.mark.parametrize(
    ("own", "facts", "expected"),
    [
        ({}, {}, (MOST_FREE_DRAFTS, 7, True)),
        # A number of drafts that was asked for limits free drafts as well.
        ({"num_speculative_tokens": 3}, {}, (3, 3, True)),
        ({"num_speculative_tokens": 1}, {}, (1, 1, True)),
        ({"free_drafts": "off"}, {}, (7, 7, False)),
        ({"draft_length": "fixed"}, {}, (7, 7, False)),
        ({}, {"is_hybrid": True}, (7, 7, True)),  # every draft would take the memory of a state
        ({"free_drafts": "off"}, {"is_hybrid": True}, (7, 7, False)),
    ],
)
def test_room_for_free_drafts_where_drafts_may_be_longer_than_blocks(
    monkeypatch: pytest.MonkeyPatch,
    drafter: Path,
    own: dict[str, Any],
    facts: dict[str, Any],
    expected: tuple[int, int, bool],
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)  # linear attention
    options = resolved(drafter, own, to=target(**facts))
    found = options.num_speculative_tokens, options.draft_width, options.free_drafts
    assert found == expected
    assert from_json(options.to_json()) == options
    width = options.draft_width
    most_free = width if options.free_drafts else 0
    without_room = replace(options, num_speculative_tokens=width, most_free=most_free)
    narrow: dict[str, Any] = {"max_num_batched_tokens": MOST_FREE_DRAFTS}
    assert resolved(drafter, own, to=target(**facts), **narrow) == without_room
    tiny = target(**facts, max_model_len=MOST_FREE_DRAFTS)  # vLLM makes its steps no larger
    assert resolved(drafter, own, to=tiny, max_num_seqs=1) == without_room


@pytest.mark.parametrize("own", [{}, {"draft_load_config": {"load_format": "dummy"}}])
def test_a_drafter_with_made_up_weights_needs_no_files(drafter: Path, own: dict[str, Any]) -> None:
    for file in drafter.glob("*.safetensors"):
        file.unlink()
    load_format = "auto" if own else "dummy"
    assert resolved(drafter, own, load_format=load_format).draft_width == 7
    read = {"draft_load_config": {"load_format": "auto"}}
    with pytest.raises(DrafterError, match="safetensors"):
        resolved(drafter, read, load_format=load_format)


@pytest.mark.parametrize(
    ("is_v2", "asked", "room"),
    [
        (None, {}, MOST_FREE_DRAFTS),
        (False, {}, MOST_FREE_DRAFTS),
        (False, {"max_num_batched_tokens": MOST_FREE_DRAFTS + 1}, MOST_FREE_DRAFTS),
        (True, {}, 7),  # free drafts are at most one block
        (False, LORA, 7),  # vLLM needs rows for all drafts of all requests
        (False, {"scheduler_cls": "mine.Scheduler"}, 7),  # it would reserve that for each request
    ],
)
@pytest.mark.parametrize("tree", [{}, {"draft_tree": "off"}])
def test_who_may_have_more_drafts_than_a_block(
    monkeypatch: pytest.MonkeyPatch,
    drafter: Path,
    is_v2: bool | None,
    asked: dict[str, Any],
    room: int,
    tree: dict[str, str],
) -> None:
    """Drafts are chains unless trees are asked for."""
    monkeypatch.setattr("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", is_v2)
    options = resolved(drafter, tree, **asked)
    assert options.draft_width == 7
    assert (options.num_speculative_tokens, options.most_free) == (room, room)
    assert options.runner == ("v2" if is_v2 else "v1")
    assert options.draws_drafts == bool(is_v2)
    greedy = resolved(drafter, {**tree, "draft_sample_method": "greedy"}, **asked)
    assert greedy == replace(options, draws_drafts=False)


@pytest.mark.parametrize(
    ("is_v2", "own", "asked", "nodes", "room"),
    [
        (True, {}, {}, 32, 32),
        (True, {}, {}, 4, 7),  # a chain has more
        (True, {"draft_tree": "auto"}, {}, 31, 31),
        (True, {"draft_length": "fixed", "num_speculative_tokens": 3}, {}, 16, 16),
        (False, {}, {}, 0, 32),  # free drafts
        (True, {}, {"scheduler_cls": "mine.Scheduler"}, 0, 7),
        (True, {}, LORA, 0, 7),
    ],
)
def test_a_number_of_nodes_is_room_for_a_tree_on_v2(
    monkeypatch: pytest.MonkeyPatch,
    drafter: Path,
    is_v2: bool,
    own: dict[str, Any],
    asked: dict[str, Any],
    nodes: int,
    room: int,
) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", is_v2)
    own = {"draft_tree": nodes or 32, **own}
    options = resolved(drafter, own, **asked)
    assert (options.tree_nodes, options.num_speculative_tokens) == (nodes, room)
    assert options.draft_width == own.get("num_speculative_tokens", 7)
    assert resolved(drafter, own, to=target(is_hybrid=True), **asked).tree_nodes == 0


@pytest.mark.parametrize(
    ("on_cuda", "own", "asked", "ranks", "hybrid", "captures"),
    [
        (True, {}, {}, 1, None, True),
        (True, {"draft_length": "fixed"}, {}, 1, None, False),
        (True, {}, {"scheduler_cls": "mine.Scheduler"}, 1, None, False),
        (True, {}, {}, 2, None, False),  # data parallelism: vLLM drops the table
        (False, {}, {}, 1, None, False),  # there are no graphs
        (True, {}, {}, 1, "Qwen3NextForCausalLM", True),
        (True, {}, {}, 1, "NemotronHForCausalLM", False),  # Mamba: only full lengths
    ],
)
def test_graphs_for_a_few_lengths_where_a_scheduler_chooses_among_them(
    monkeypatch: pytest.MonkeyPatch,
    drafter: Path,
    on_cuda: bool,
    own: dict[str, Any],
    asked: dict[str, Any],
    ranks: int,
    hybrid: str | None,
    captures: bool,
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: on_cuda)
    it = target(is_hybrid=hybrid is not None, architecture=hybrid)
    options = resolved(drafter, own, to=it, ranks=parallel(data=ranks), **asked)
    assert options.captures_lengths is captures


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


ANCHORED = {"dflash_config": {"sample_from_anchor": True}}


@pytest.mark.parametrize(
    ("asked", "config", "width", "remarks"),
    [
        (12, {}, 7, 0),  # rows beyond its block mean nothing
        (5, {"block_size": None}, 5, 0),
        (5, {"block_size": None, **ANCHORED}, 5, 0),
        (12, ANCHORED, 8, 0),
        (5, {"vocab_size": 310}, 5, 1),
    ],
)
def test_pairs_that_vllm_takes_as_well(
    drafter: Path, asked: int, config: dict[str, Any], width: int, remarks: int
) -> None:
    options = resolved(drafter, {"num_speculative_tokens": asked}, config)
    assert options.draft_width == width
    spec = options.drafter
    assert options.block_rows == width + ("dflash_config" not in config)
    assert (spec.vocab_size, spec.draft_vocab_size, len(spec.remarks)) == (320, 320, remarks)


@pytest.mark.parametrize(
    ("own", "config", "tensor", "words"),
    [
        ({}, {"vocab_size": 1345}, 1, "does not fit target 'target': vocab_size is 1345"),
        ({}, {"intermediate_size": 95}, 1, "the weights do not match config.json"),
        ({"draft_tensor_parallel_size": 4}, {}, 2, "draft_tensor_parallel_size is 4"),
        ({"drafter_overrides": {"zzz": 1}}, {}, 1, r"\['zzz'\] changes nothing"),
    ],
)
def test_pairs_that_are_refused(
    drafter: Path, own: dict[str, Any], config: dict[str, Any], tensor: int, words: str
) -> None:
    with pytest.raises(DrafterError, match=words):
        resolved(drafter, own, config, ranks=parallel(tensor))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("model.safetensors", r"model\.safetensors' cannot be read"),
        ("model.safetensors.index.json", r"lacks 'none\.safetensors'"),
        ("mask_embedding.pt", r"mask_embedding\.pt has 63 numbers, hidden_size is 64"),
        (None, r"holds no \*\.safetensors file\. Download its weights into it; others"),
    ],
)
def test_weights_that_are_refused(drafter: Path, damage: str | None, words: str) -> None:
    spec = parse_config("it", drafter_config())
    check_weights(spec, drafter)
    if damage is None:
        (drafter / "model.safetensors").unlink()
    elif damage.endswith(".pt"):
        torch.save(torch.zeros(63), drafter / damage)
    else:
        (drafter / damage).write_text(json.dumps({"weight_map": {"x": "none.safetensors"}}))
    with pytest.raises(DrafterError, match=f"^drafter 'it': .*{words}") as refused:
        check_weights(spec, drafter)
    assert str(refused.value).endswith(".")
    assert not str(refused.value).endswith("..")
