"""Every reason why a drafter cannot draft for a target, and which ranks split it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.pairs import as_speculators, dflash2_config, drafter_config, lilicorr_config
from vllm_dflash.checkpoint.pairing import (
    PairingTarget,
    adapt_to_target,
    check_pair,
    describe_ranks,
    drafter_ranks,
    pair_faults,
    target_unsupported_reason,
    undivided_parts,
)
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec

# Reads layers 0 and 2 of 4, 64 wide; mask token 300 of 320.
DRAFTER = parse_config("drafts", drafter_config())
TARGET = PairingTarget("target", "SomeForCausalLM", 4, 64, 320, supports_taps=True)


def drafter_with(**changes: Any) -> DrafterSpec:
    return parse_config("drafts", drafter_config(**changes))


@pytest.mark.parametrize(
    ("drafter", "target"),
    [
        (DRAFTER, TARGET),
        (DRAFTER, replace(TARGET, on_cpu=True)),
        # The last layer, and the last entry of the vocabulary, are inside.
        (drafter_with(dflash_config={"target_layer_ids": [0, 3], "mask_token_id": 319}), TARGET),
        (drafter_with(num_target_layers=None), replace(TARGET, num_layers=3)),
        # Columns of the drafter's own head are mapped to ids, however the target is padded.
        (drafter_with(draft_vocab_size=100), replace(TARGET, vocab_size=352)),
        (drafter_with(draft_vocab_size=100), replace(TARGET, vocab_size=310)),
        # The drafter's own embedding receives all of the target's ids.
        (
            drafter_with(draft_vocab_size=100, hidden_size=32, target_hidden_size=64),
            replace(TARGET, vocab_size=310),
        ),
    ],
)
def test_what_fits(drafter: DrafterSpec, target: PairingTarget) -> None:
    assert target_unsupported_reason(target) is None
    assert pair_faults(drafter, target) == []
    check_pair(drafter, target)


NARROW = drafter_with(draft_vocab_size=100, hidden_size=32, target_hidden_size=64)


@pytest.mark.parametrize(
    ("drafter", "target", "words"),
    [
        (
            DRAFTER,
            {"supports_taps": False},
            ["(its class lacks SupportsEagle3); try --model-impl transformers"],
        ),
        (
            DRAFTER,
            {"num_layers": 2},
            [
                "target_layer_ids [2] lie outside the target, whose 2 layers are numbered 0 to 1",
                "num_target_layers is 4 in the drafter, the target has 2 layers",
            ],
        ),
        (DRAFTER, {"hidden_size": 48}, ["states of size 64, the target's hidden_size is 48"]),
        (
            DRAFTER,
            {"vocab_size": 300},
            ["vocab_size is 320 in the drafter and 300", "mask_token_id 300 is outside"],
        ),
        (NARROW, {"vocab_size": 352}, ["and 352 in the target, whose last tokens it cannot embed"]),
        (
            drafter_with(head_dim=20),
            {"on_cpu": True},
            ["head_dim is 20: vLLM's CPU kernels need a multiple of 8"],
        ),
    ],
)
def test_each_reason_with_both_values(
    drafter: DrafterSpec, target: dict[str, object], words: list[str]
) -> None:
    other = replace(TARGET, **target)  # type: ignore[arg-type]
    of_pair = pair_faults(drafter, other)
    reason = target_unsupported_reason(other)
    faults = ([reason] if reason else []) + of_pair
    assert [word in fault for word, fault in zip(words, faults, strict=True)] == [True] * len(words)
    with pytest.raises(DrafterError) as refused:
        check_pair(drafter, other)
    message = str(refused.value)
    assert [fault for fault in faults if fault not in message] == []
    assert ("Choose a drafter trained for this target." in message) == bool(of_pair)


@pytest.mark.parametrize(
    ("drafter", "vocab_size"),
    [(DRAFTER, 320 + 1024), (drafter_with(vocab_size=320 + 1024), 320)],
)
def test_padding_is_the_targets(drafter: DrafterSpec, vocab_size: int) -> None:
    target = replace(TARGET, vocab_size=vocab_size)
    spec = adapt_to_target(drafter, target)
    assert pair_faults(spec, target) == []
    assert (spec.vocab_size, spec.draft_vocab_size) == (vocab_size, vocab_size)
    (remark,) = spec.remarks
    assert f"vocab_size is {drafter.vocab_size} in its config and {vocab_size} in" in remark


@pytest.mark.parametrize(
    ("drafter", "vocab_size"),
    [
        (DRAFTER, 320 + 1025),  # more than padding
        (drafter_with(hidden_size=32, target_hidden_size=64), 352),  # has its own embedding
        (drafter_with(**dflash2_config()), 352),  # its codebooks have a row per token
        (parse_config("drafts", as_speculators(drafter_config())), 352),  # may have its own
    ],
)
def test_other_tokens_than_the_targets(drafter: DrafterSpec, vocab_size: int) -> None:
    target = replace(TARGET, vocab_size=vocab_size)
    assert adapt_to_target(drafter, target) is drafter
    (fault,) = pair_faults(drafter, target)
    assert fault == f"vocab_size is 320 in the drafter and {vocab_size} in the target"


@pytest.mark.parametrize(
    ("config", "theirs", "remarks"),
    [
        ({"rope_theta": 5e5}, 1e4, 0),
        ({"rope_theta": None}, None, 1),
        ({"rope_theta": None}, 1e4, 2),
        ({"rope_theta": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4, 2),
        ({"rope_theta": None, "rope_scaling": {"rope_theta": 1e6}}, 1e4, 0),
        ({"rope_theta": None, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, 1e4, 0),
    ],
)
def test_an_assumed_rotary_base_is_said_beside_the_targets(
    config: dict[str, Any], theirs: float | None, remarks: int
) -> None:
    without = {name: value for name, value in drafter_config().items() if "rope" not in name}
    target = replace(TARGET, rope_theta=theirs)
    found = adapt_to_target(parse_config("it", without | config), target).remarks
    assert len(found) == remarks
    if found:
        assert "config.json states no rope_theta: 1,000,000 is assumed" in found[0]
    if remarks == 2:
        assert "assumed to be 1,000,000, and the target's is 10,000" in found[1]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "ranks", "left"),
    [
        (4, 2, 96, 1, []),
        (4, 2, 96, 2, []),
        (4, 2, 96, 4, []),  # two ranks share a key/value head
        (4, 2, 96, 3, ["4 attention heads", "2 key/value heads"]),
        (4, 1, 95, 4, ["95 rows of its MLP (intermediate_size)"]),
        (6, 3, 96, 2, ["3 key/value heads"]),
    ],
)
def test_what_ranks_do_not_divide(
    heads: int, kv_heads: int, rows: int, ranks: int, left: list[str]
) -> None:
    spec = drafter_with(
        num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=rows
    )
    assert undivided_parts(spec, ranks) == left
    assert drafter_ranks(spec, ranks) == (1 if left else ranks)
    assert drafter_ranks(spec, ranks, asked=1) == 1
    if not left:
        assert drafter_ranks(spec, ranks, asked=ranks) == ranks
        return
    assert f"({', '.join(left)} do not divide by {ranks})" in describe_ranks(spec, ranks, 1)
    with pytest.raises(DrafterError, match=r"which does not divide .* Leave it out"):
        drafter_ranks(spec, ranks, asked=ranks)


def test_how_a_drafter_is_split() -> None:
    assert describe_ranks(DRAFTER, 2, 2) == "the drafter is split over 2 ranks, like the target"
    assert describe_ranks(DRAFTER, 2, 1) == "each of 2 ranks has the whole drafter (as configured)"
    with pytest.raises(DrafterError, match=r"is 4, the target's tensor_parallel_size 2: .* 2 or 1"):
        drafter_ranks(DRAFTER, 2, asked=4)


def test_the_head_of_lilicorr_is_split_on_all_ranks() -> None:
    """vLLM splits it even if each rank holds the rest of the drafter whole."""
    spec = drafter_with(**lilicorr_config(), intermediate_size=95)
    assert [drafter_ranks(spec, ranks) for ranks in (1, 2, 4, 8)] == [1] * 4  # 48 and 72 rows
    for ranks in (5, 16):
        with pytest.raises(
            DrafterError, match=f"of 48 and 72 rows, .*tensor_parallel_size {ranks}"
        ):
            drafter_ranks(spec, ranks, asked=1)
