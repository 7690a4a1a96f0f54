"""What DFlash writes into vLLM's speculative config."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from support.configs_by_hand import QWEN
from support.log_lines import log_lines
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.config.engine_settings import MANY_REQUESTS as ANY
from vllm_dflash.config.engine_settings import length_table, write_speculative_config
from vllm_dflash.config.speculative_settings import IGNORED

PLAIN = EngineOptions(7, 5, "fixed", parse_config("it", QWEN), drafter_ranks=2)
ALWAYS = {
    "model": "it",
    "method": "dflash",
    "num_speculative_tokens": 7,
    "draft_tensor_parallel_size": 2,
    "disable_eagle_block_drop": True,
}


def written(config: dict[str, Any], options: EngineOptions = PLAIN, **flags: Any) -> dict[str, Any]:
    args: Any = SimpleNamespace(
        speculative_config=config, **{"spec_method": None, "spec_tokens": None, **flags}
    )
    before = dict(config)
    write_speculative_config(args, options)
    assert config == before  # the user's config is unchanged
    return args.speculative_config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model": "it"}, ALWAYS),
        # Our keys are removed; resolved values replace the written ones.
        ({"model": "it", "draft-length": "fixed", "drafter_overrides": {"a": 1}}, ALWAYS),
        ({"model": "it", "free-drafts": "off", "draft-length": "fixed"}, ALWAYS),
        ({"model": "it", "draft_tensor_parallel_size": 8}, ALWAYS),
        ({"model": "it", "max-model-len": 9}, {**ALWAYS, "max_model_len": 9}),
        (
            {"model": "it", "disable_eagle_block_drop": False},
            {**ALWAYS, "disable_eagle_block_drop": False},
        ),
        (
            {"model": "it", "draft_sample_method": "greedy"},
            {**ALWAYS, "draft_sample_method": "greedy"},
        ),
    ],
)
def test_what_vllm_is_given(config: dict[str, Any], expected: dict[str, Any]) -> None:
    with log_lines() as lines:
        assert written(config) == expected
    assert lines == []


def test_what_a_flag_set_is_not_written_again() -> None:
    """vLLM refuses a config and a flag for the same thing."""
    flags: dict[str, Any] = {"spec_method": "dflash", "spec_tokens": 7}
    assert written({"model": "it"}, **flags) == {
        key: value
        for key, value in ALWAYS.items()
        if key not in ("method", "num_speculative_tokens")
    }


def test_lengths_to_capture_are_written_where_graphs_are_captured() -> None:
    table = {"num_speculative_tokens_per_batch_size": length_table(PLAIN.draft_width)}
    assert written({"model": "it"}, replace(PLAIN, captures_lengths=True)) == {**ALWAYS, **table}


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([0.9] * 6 + [0.5], [0.9] * 6 + [0.5]),
        ([0.9] * 10, [0.9] * 7),
        ([0.9, 0.2], [0.9] + [0.2] * 6),
    ],
)
def test_synthetic_rates_are_as_many_as_drafts(rates: list[float], expected: list[float]) -> None:
    found = written({"model": "it", "synthetic_acceptance_rates": rates})
    assert found == {**ALWAYS, "synthetic_acceptance_rates": expected}


@pytest.mark.parametrize(
    ("options", "method", "shards", "why"),
    [
        ({}, None, False, None),
        ({}, "standard", False, None),
        ({}, "block", False, "drafts are drawn only with the rejection_sample_method 'standard'"),
        ({}, None, True, "drafts are not drawn where ranks share the sampling of a batch"),
        ({"tree_nodes": 15}, None, False, "draft trees have the most likely tokens"),
        ({"draws_drafts": False}, None, False, "Model Runner V1 cannot draw drafts"),
    ],
)
def test_who_can_draw_drafts(
    options: dict[str, Any], method: str | None, shards: bool, why: str | None
) -> None:
    """vLLM is always told that drafts are greedy, since it would keep the logits of others."""
    other = {} if method is None else {"rejection_sample_method": method}
    config = {"model": "it", "draft_sample_method": "probabilistic", **other}
    with log_lines() as lines:
        flags = {"enable_batch_sharded_sampling": shards}
        found = written(config, replace(PLAIN, **{"draws_drafts": True, **options}), **flags)
    assert found == {**ALWAYS, **other, "draft_sample_method": "greedy"}
    assert [line.split(". ")[0] for line in lines] == [
        f"WARNING draft_sample_method 'probabilistic' is ignored: {why}"
    ] * bool(why)


@pytest.mark.parametrize("key", IGNORED)
@pytest.mark.parametrize("value", [[(1, 8, 3)], False])
def test_options_without_a_meaning_here(key: str, value: Any) -> None:
    assert "use_local_argmax_reduction" in IGNORED
    with log_lines() as lines:
        assert written({"model": "it", key: value}) == ALWAYS
    assert [line.split(":")[0] for line in lines] == [f"WARNING {key} is ignored"] * bool(value)


def test_a_trees_nodes_are_captured_beside_chains() -> None:
    """Sizes it may be cut to are captured as well, unless a chain has that many."""
    expected = [(1, 1, 15), (2, 2, 7), (3, 3, 0), (4, 4, 3), (5, 5, 1), (6, ANY, 15)]
    assert length_table(7, 15) == expected
    assert length_table(7, 5) == length_table(7)
    for width, nodes, lengths in (
        (7, 31, [31, 7, 0, 15, 3, 1]),
        (15, 31, [31, 15, 0, 7, 3]),
        (15, 63, [63, 15, 0, 31, 7, 3]),
        (5, 40, [40, 5, 0, 15, 7, 2]),
        (3, 14, [14, 3, 0, 1]),
        (3, 15, [15, 3, 0, 7, 1]),
    ):
        assert [length for *_, length in length_table(width, nodes)] == [*lengths, nodes]


@pytest.mark.parametrize(
    ("max_draft", "max_requests"), [(1, 1), (1, 1024), (2, 2), (3, 4), (7, 3), (15, 64)]
)
def test_the_table_names_the_lengths_to_capture(max_draft: int, max_requests: int) -> None:
    """As vLLM reads it: K is always there, 0 if two requests fit; K has the most batch sizes."""
    lookup = build_dynamic_sd_schedule_lookup(
        length_table(max_draft),
        vllm_max_batch_size=max_requests,
        vllm_num_speculative_tokens=max_draft,
    )
    few = {entry[2] for entry in length_table(max_draft)}
    lengths = lookup[1:]
    assert {max_draft, 0} <= set(lengths) <= few if max_requests > 1 else lengths == [max_draft]
    if max_requests > 4:
        assert set(lengths) == few
        assert lengths[-1] == max_draft
