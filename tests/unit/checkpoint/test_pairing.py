"""Every reason why a drafter cannot draft for a target, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.pairs import as_speculators, dflash2_config, drafter_config
from vllm_dflash.checkpoint.pairing import (
    PairingTarget,
    adapt_to_target,
    check_pair,
    pair_faults,
    target_faults,
)
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec

# Reads layers 0 and 2 of 4, 64 wide; mask token 300 of 320.
DRAFTER = parse_config("drafts", drafter_config())
TARGET = PairingTarget("target", "SomeForCausalLM", 4, 64, 320, supports_taps=True)


def all_faults(target: PairingTarget) -> list[str]:
    """Return all faults in the order of the message."""
    return target_faults(target) + pair_faults(DRAFTER, target)


@pytest.mark.parametrize("target", [TARGET, replace(TARGET, on_cpu=True)])
def test_what_fits(target: PairingTarget) -> None:
    assert all_faults(target) == []
    check_pair(DRAFTER, target)


def test_bounds() -> None:
    """The last layer, and the last entry of the vocabulary, are inside."""
    config = drafter_config(dflash_config={"target_layer_ids": [0, 3], "mask_token_id": 319})
    assert pair_faults(parse_config("it", config), TARGET) == []
    config = drafter_config(num_target_layers=None)
    assert pair_faults(parse_config("it", config), replace(TARGET, num_layers=3)) == []


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            {"supports_taps": False},
            ["(its class lacks SupportsEagle3); try --model-impl transformers"],
        ),
        ({"num_layers": 5}, ["num_target_layers is 4 in the drafter, the target has 5 layers"]),
        (
            {"num_layers": 2},
            [
                "target_layer_ids [2] lie outside the target, whose 2 layers are numbered 0 to 1",
                "num_target_layers is 4 in the drafter, the target has 2 layers",
            ],
        ),
        ({"hidden_size": 48}, ["states of size 64, the target's hidden_size is 48"]),
        ({"vocab_size": 321}, ["vocab_size is 320 in the drafter and 321 in the target"]),
        (
            {"vocab_size": 300},
            ["vocab_size is 320 in the drafter and 300", "mask_token_id 300 is outside"],
        ),
    ],
)
def test_each_reason_with_both_values(target: dict[str, object], words: list[str]) -> None:
    other = replace(TARGET, **target)  # type: ignore[arg-type]
    faults = all_faults(other)
    assert [word in fault for word, fault in zip(words, faults, strict=True)] == [True] * len(words)
    with pytest.raises(DrafterError) as refused:
        check_pair(DRAFTER, other)
    message = str(refused.value)
    assert [fault for fault in faults if fault not in message] == []
    needs_another_drafter = bool(pair_faults(DRAFTER, other))
    assert ("Choose a drafter trained for this target." in message) == needs_another_drafter


def with_vocabulary(**changes: Any) -> DrafterSpec:
    return parse_config("drafts", drafter_config(**changes))


@pytest.mark.parametrize(
    ("drafter", "vocab_size", "words"),
    [
        # Columns of the drafter's own head are mapped to ids, however the target is padded.
        (with_vocabulary(draft_vocab_size=100), 352, None),
        (with_vocabulary(draft_vocab_size=100), 310, None),
        # The drafter's own embedding receives all of the target's ids.
        (with_vocabulary(draft_vocab_size=100, hidden_size=32, target_hidden_size=64), 310, None),
        (
            with_vocabulary(draft_vocab_size=100, hidden_size=32, target_hidden_size=64),
            352,
            "vocab_size is 320 in the drafter and 352 in the target, whose last tokens it cannot",
        ),
    ],
)
def test_vocabularies_of_two_sizes(
    drafter: DrafterSpec, vocab_size: int, words: str | None
) -> None:
    faults = pair_faults(drafter, replace(TARGET, vocab_size=vocab_size))
    assert faults == [] if words is None else words in faults[0]


@pytest.mark.parametrize(
    ("drafter", "vocab_size"),
    [(with_vocabulary(), 320 + 1024), (with_vocabulary(vocab_size=320 + 1024), 320)],
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
        (with_vocabulary(), 320 + 1025),  # more than padding
        (with_vocabulary(hidden_size=32, target_hidden_size=64), 352),  # has its own embedding
        (with_vocabulary(**dflash2_config()), 352),  # its codebooks have a row per token
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
