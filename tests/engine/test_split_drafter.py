"""A drafter that is split over two ranks computes what the reference computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.pairs import Pair, dflash2_config, lilicorr_config, make_pair
from support.ranks import draft_on_ranks
from support.reference_decoding import block_states

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int]]] = {
    # changes to the drafter, options of ours; key/value heads and MLP rows of each rank
    "split": ({}, {}, (1, 48)),
    "a-key-value-head-for-two-ranks": ({"num_key_value_heads": 1}, {}, (1, 48)),
    "heads-that-do-not-divide": (
        {"num_attention_heads": 6, "num_key_value_heads": 3},
        {},
        (3, 96),
    ),
    "an-mlp-that-does-not-divide": ({"intermediate_size": 95}, {}, (2, 95)),
    "whole-as-configured": ({}, {"draft_tensor_parallel_size": 1}, (2, 96)),
    "biases": ({"attention_bias": True}, {}, (1, 48)),
    "sinks": ({"dflash_config": {"attention_sink_bias": True}}, {}, (1, 48)),
    "sinks-whole": (
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "dflash_config": {"attention_sink_bias": True},
        },
        {},
        (3, 96),
    ),
    "own-small-vocabulary": ({"own_vocabulary": True, "draft_vocab_size": 100}, {}, (1, 48)),
    "dflash2": (dflash2_config(), {}, (1, 48)),
    "lilicorr": (lilicorr_config(), {}, (1, 48)),
    "lilicorr-whole": (lilicorr_config(intermediate_size=95), {}, (2, 95)),
}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Pair, Any, Any]]:
    """Results of two ranks with each shape: the pair, the contexts, and what each rank reported."""
    folder = tmp_path_factory.mktemp("ranks")
    tasks = []
    for name, (changes, options, _) in SHAPES.items():
        pair = make_pair(folder / name, **changes)
        width = len(pair.spec.taps) * pair.spec.target_hidden_size
        generator = torch.Generator().manual_seed(0)
        contexts = [torch.randn(length, width, generator=generator) for length in (3, 41, 70)]
        tasks.append((pair, contexts, options))
    told = draft_on_ranks(folder, tasks, num_ranks=2)
    return {
        name: (pair, contexts, ranks)
        for name, (pair, contexts, _), ranks in zip(SHAPES, tasks, told, strict=True)
    }


@pytest.mark.parametrize("name", SHAPES)
def test_a_split_drafter_computes_the_reference(
    of_ranks: dict[str, tuple[Pair, Any, Any]], name: str
) -> None:
    pair, contexts, ranks = of_ranks[name]
    target, reference = pair.load_target(), pair.load_drafter()
    k = pair.spec.max_draft_tokens
    hidden = [
        block_states(target, reference, context, 7 + number, k)
        for number, context in enumerate(contexts)
    ]
    with torch.inference_mode():
        logits = [reference.logits(states, target) for states in hidden]
        newest = [reference.context(context[-1]) for context in contexts]
        blocks = zip(logits, hidden, (7, 8, 9), newest, strict=True)
        drafts = [reference.choose(*block, target).tolist() for block in blocks]
    expected = torch.cat(logits)
    for told in ranks:
        assert (told["kv_heads"], told["mlp_rows"]) == SHAPES[name][2]
        if pair.spec.num_candidates is None:
            assert (told["logits"] - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert told["drafts"] == drafts
