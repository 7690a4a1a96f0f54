"""Every reason why a drafter cannot draft for a target, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.pairs import as_speculators, drafter_config
from vllm_dflash.checkpoint.pairing import (
    PairingTarget,
    check_pair,
    pair_faults,
    target_faults,
)
from vllm_dflash.checkpoint.read import parse_config, parse_overridden
from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec

# Reads layers 0 and 2 of 4, 64 wide; mask token 300 of 320.
DRAFTER = parse_config("drafts", drafter_config())
TARGET = PairingTarget("target", "SomeForCausalLM", 4, 64, 320, supports_taps=True)


def all_faults(target: PairingTarget) -> list[str]:
    """In the order of the message."""
    return target_faults(target) + pair_faults(DRAFTER, target)


@pytest.mark.parametrize(
    "target",
    [
        TARGET,
        replace(TARGET, on_cpu=True),
        replace(TARGET, multimodal=True, has_untried_states=True),  # on CUDA
    ],
)
def test_what_fits(target: PairingTarget) -> None:
    assert all_faults(target) == []
    check_pair(DRAFTER, target)


def test_bounds() -> None:
    """The last layer, and the last entry of the vocabulary, are inside."""
    config = drafter_config(dflash_config={"target_layer_ids": [0, 3], "mask_token_id": 319})
    assert pair_faults(parse_config("it", config), TARGET) == []
    config = drafter_config(num_target_layers=None)
    assert pair_faults(parse_config("it", config), replace(TARGET, num_layers=3)) == []


# What to do is said with some of them: a flag, a platform or a number that has to be right.
REMEDIES: dict[str, tuple[Any, ...]] = {
    "supports_taps": (False, "(its class lacks SupportsEagle3)", " try --model-impl transformers "),
    "multimodal": (True, "CUDA only", "there is a checkpoint of the text model alone, use that"),
    "has_untried_states": (True, "gated delta nets only (Qwen3-Next, Qwen3.5); it needs CUDA"),
}


@pytest.mark.parametrize("field", REMEDIES)
def test_what_to_do(field: str) -> None:
    value, *words = REMEDIES[field]
    (fault,) = all_faults(replace(TARGET, on_cpu=True, **{field: value}))
    assert [word for word in words if word not in fault] == []


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"supports_taps": False}, ["SomeForCausalLM gives no hidden states"]),
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
        ({"on_cpu": True, "multimodal": True}, ["SomeForCausalLM is multimodal"]),
        ({"on_cpu": True, "has_untried_states": True}, ["has layers with a state"]),
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


HINT = '"drafter_overrides": {"vocab_size": 352}, which a drafter without an embedding and a head'


@pytest.mark.parametrize(
    ("drafter", "vocab_size", "words"),
    [
        # Columns of a head of its own become ids by its map, whatever the target is padded to.
        (with_vocabulary(draft_vocab_size=100), 352, None),
        (with_vocabulary(draft_vocab_size=100), 310, None),
        # An embedding of its own is given all of the target's ids.
        (with_vocabulary(draft_vocab_size=100, hidden_size=32, target_hidden_size=64), 310, None),
        (
            with_vocabulary(draft_vocab_size=100, hidden_size=32, target_hidden_size=64),
            352,
            "vocab_size is 320 in the drafter and 352 in the target, whose last tokens it cannot",
        ),
        # Without a map, ids have to be the same.
        (with_vocabulary(), 352, HINT),
        (with_vocabulary(), 320 + 1024, '{"vocab_size": 1344}'),
        (with_vocabulary(vocab_size=320 + 1024), 320, '{"vocab_size": 320}'),
    ],
)
def test_vocabularies_of_two_sizes(
    drafter: DrafterSpec, vocab_size: int, words: str | None
) -> None:
    faults = pair_faults(drafter, replace(TARGET, vocab_size=vocab_size))
    assert faults == [] if words is None else words in faults[0]


@pytest.mark.parametrize(
    ("drafter", "vocab_size"),
    [
        (with_vocabulary(), 320 + 1025),  # more than padding
        (with_vocabulary(hidden_size=32, target_hidden_size=64), 352),  # which brings its own
        (parse_config("drafts", as_speculators(drafter_config())), 352),  # nested too deep
    ],
)
def test_no_override_is_advised_where_none_would_help(
    drafter: DrafterSpec, vocab_size: int
) -> None:
    (fault,) = pair_faults(drafter, replace(TARGET, vocab_size=vocab_size))
    assert fault == f"vocab_size is 320 in the drafter and {vocab_size} in the target"


def test_the_advised_override_is_what_mends_it() -> None:
    spec = parse_overridden("drafts", drafter_config(), {"vocab_size": 352})
    assert pair_faults(spec, replace(TARGET, vocab_size=352)) == []
