"""The vLLM drafter against the reference, in float32, on a poisoned paged cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support.cached_drafter import Harness, Row, check_logits, features_of
from support.drafter_harness import DrafterHarness, ProposerHarness
from support.engines import slow_on_v2
from support.pairs import Pair, dflash2_config, lilicorr_config, make_pair
from support.reference_decoding import block_states

FULL, SLIDING = "full_attention", "sliding_attention"
SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mqa": {"num_key_value_heads": 1},
    "six-taps": {"num_target_layers": 6, "dflash_config": {"target_layer_ids": [0, 1, 2, 3, 4, 5]}},
    "block-16": {"block_size": 16},
    "biases": {"attention_bias": True},
    "wide-heads": {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    "five-layers": {"num_hidden_layers": 5},
    "causal": {"is_causal": True},
    "mixed-windows": {"layer_types": [SLIDING, FULL], "sliding_window": 20},
    "sliding-non-causal": {
        "layer_types": [SLIDING, FULL],
        "sliding_window": 20,
        "dflash_config": {"causal": False},
    },
    "sinks": {"dflash_config": {"attention_sink_bias": True}},
    "sinks-and-window": {
        "layer_types": [SLIDING, FULL],
        "sliding_window": 20,
        "dflash_config": {"attention_sink_bias": True},
    },
    "value-scale": {"dflash_config": {"attention_value_scale": 0.7}},
    "interleaved-rope": {"is_neox_style": False},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "half-of-each-head-rotated": {
        "rope_parameters": None,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "half-of-each-head-rotated-in-pairs": {"partial_rotary_factor": 0.5, "is_neox_style": False},
    "speculators": {"speculators": True},
    "speculators-small-vocabulary": {
        "speculators": True,
        "draft_vocab_size": 128,
        "own_vocabulary": True,
    },
    "small-vocabulary": {"draft_vocab_size": 100},
    "small-vocabulary-of-a-padded-target": {"draft_vocab_size": 100, "target_vocab_size": 352},
    "own-vocabulary": {"own_vocabulary": True, "logit_scale": 0.25},
    "narrower-than-its-target": {"target_hidden_size": 96},
    "mask-embedding": {"mask_embedding": True},
    "sample-from-anchor": {"dflash_config": {"sample_from_anchor": True}},
    "dflash2-sample-from-anchor": dflash2_config(dflash_config={"sample_from_anchor": True}),
    "dflash2": dflash2_config(),
    "dflash2-scales": dflash2_config(
        dflash_config={
            "input_embedding_scale": 1.7,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 0.8,
        }
    ),
    "dflash2-one-row": dflash2_config(dflash_config={"conv_kernel_size": 1, "selector_top_k": 1}),
    "dflash2-kernel-wider-than-the-block": dflash2_config(dflash_config={"conv_kernel_size": 12}),
    "dflash2-one-group": dflash2_config(dflash_config={"conv_group_size": 64}),
    "dflash2-own-vocabulary": {"own_vocabulary": True, **dflash2_config()},
    "dflash2-mask-embedding": {
        "mask_embedding": True,
        **dflash2_config(dflash_config={"input_embedding_scale": 1.7}),
    },
    "dflash2-speculators": {"speculators": True, **dflash2_config()},
    "lilicorr": lilicorr_config(),
    "lilicorr-convolutions": lilicorr_config(
        dflash_config={"conv_kernel_size": 3, "conv_group_size": 8}
    ),
    "lilicorr-as-wide-as-the-drafter": lilicorr_config(
        dflash_config={"lilicorr_hidden_size": 0, "lilicorr_num_heads": 4}
    ),
    "lilicorr-one-candidate": lilicorr_config(dflash_config={"lilicorr_candidate_topk": 1}),
    "lilicorr-own-vocabulary": {"own_vocabulary": True, **lilicorr_config()},
}


ON_V2 = ("gqa", "speculators-small-vocabulary", "sample-from-anchor", "dflash2", "lilicorr")
"""What V2's kernels see; of the others, its slow interpreter would run the same."""


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in ON_V2 else [slow_on_v2]


@pytest.fixture(params=[pytest.param(SHAPES[n], marks=marks_of(n), id=n) for n in SHAPES])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return make_pair(tmp_path, **request.param)


def columns(harness: Harness, logits: torch.Tensor) -> torch.Tensor:
    """Return the columns of all tokens' logits that the harness has."""
    if harness.gives_log_probs:
        logits = logits.log_softmax(-1)
    return logits if harness.candidates is None else logits.gather(-1, harness.candidates)


@pytest.mark.usefixtures("runner")
def test_logits_equal_the_reference(pair: Pair) -> None:
    """Unequal contexts in one batch, stored in chunks, with rejected rows in between."""
    harness, target, reference = DrafterHarness(pair), pair.load_target(), pair.load_drafter()
    contexts = [features_of(pair, length, seed=length) for length in (3, 41, 97)]
    # Chunk by chunk, as in a chunked prefill; nothing is drafted meanwhile.
    for request, chunk in ((1, 10), (2, 50), (2, 20)):
        done = harness.lengths[request]
        rows = contexts[request][done : done + chunk]
        assert harness.step([Row(request, rows, in_prompt=True)]) == [[]]
    # The last step of request 2 verified drafts, and the target rejected four of them.
    rejected = 99.0 * features_of(pair, 4, seed=4)
    last = torch.cat([contexts[2][70:], rejected])
    drafts = harness.step(
        [
            Row(0, contexts[0], bonus=7),
            Row(1, contexts[1][10:], bonus=8),
            Row(2, last, bonus=9, num_rejected=4),
        ]
    )
    k = pair.spec.max_draft_tokens
    hidden = [
        block_states(target, reference, features, bonus, k)
        for features, bonus in zip(contexts, (7, 8, 9), strict=True)
    ]
    with torch.inference_mode():
        expected = [reference.logits(states, target) for states in hidden]
        newest = [reference.context(features[-1]) for features in contexts]
        blocks = zip(expected, hidden, (7, 8, 9), newest, strict=True)
        assert drafts == [reference.choose(*block, target).tolist() for block in blocks]
    check_logits(harness.logits, columns(harness, torch.cat(expected)))


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize(
    ("shape", "own"),
    [
        *(
            pytest.param(n, {}, marks=slow_on_v2)
            for n in ("gqa", "dflash2", "lilicorr-convolutions")
        ),
        pytest.param("dflash2", {"num_speculative_tokens": 3}, marks=slow_on_v2),
        ("dflash2-sample-from-anchor", {"num_speculative_tokens": 3}),
    ],
)
def test_a_block_beside_others_is_as_if_alone(
    tmp_path: Path, shape: str, own: dict[str, Any]
) -> None:
    """Even if one block is shorter, or all are: no row sees rows of another block."""
    pair = make_pair(tmp_path, **SHAPES[shape])
    harness = DrafterHarness(pair, **own)
    contexts = [features_of(pair, length, seed=length) for length in (33, 12, 50)]
    rows = [Row(i, rows, bonus=7 + i) for i, rows in enumerate(contexts)]
    together = harness.step(rows)
    for i, (row, features) in enumerate(zip(rows, contexts, strict=True)):
        again = Row(3 + i, features, bonus=row.bonus)
        assert harness.step([again]) == [together[i]]


def test_windows_make_no_other_cache(tmp_path: Path) -> None:
    """All layers share one cache group, also with a cache type that has scales per token."""
    harness = ProposerHarness(make_pair(tmp_path, **SHAPES["mixed-windows"]))
    attentions = harness.proposer.model.context.attentions
    assert {attention.window is None for attention in attentions} == {True, False}
    for cache_type in ("auto", "fp8_per_token_head"):
        for attention in attentions:
            attention.attn.kv_cache_dtype = cache_type
        first, *others = [each.attn.get_kv_cache_spec(harness.config) for each in attentions]
        assert others == [first] * len(others)


def check_two_blocks(harness: Harness, pair: Pair, width: int) -> None:
    """Check that two blocks side by side have the reference's drafts at this width."""
    target, reference = pair.load_target(), pair.load_drafter()
    contexts = [features_of(pair, length, seed=length) for length in (33, 50)]
    rows = [Row(i, rows, bonus=7 + i) for i, rows in enumerate(contexts)]
    drafts = harness.step(rows, num_speculative_tokens=width)
    for features, row, got in zip(contexts, rows, drafts, strict=True):
        hidden = block_states(target, reference, features, row.bonus, width)
        with torch.inference_mode():
            logits, newest = reference.logits(hidden, target), reference.context(features[-1])
            assert got == reference.choose(logits, hidden, row.bonus, newest, target).tolist()


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize("asked", [pytest.param(1, marks=slow_on_v2), 3])
@pytest.mark.parametrize(
    "shape", [pytest.param("gqa", marks=slow_on_v2), "dflash2", "lilicorr-convolutions"]
)
def test_fewer_drafts_asked_for_than_the_drafter_was_trained_for(
    tmp_path: Path, shape: str, asked: int
) -> None:
    pair = make_pair(tmp_path, **SHAPES[shape])
    check_two_blocks(DrafterHarness(pair, num_speculative_tokens=asked), pair, asked)


@pytest.mark.parametrize("shape", ["gqa", "dflash2", "lilicorr-convolutions"])
def test_blocks_narrower_than_the_drafter_was_trained_for(tmp_path: Path, shape: str) -> None:
    """As the planner asks for on V1."""
    pair = make_pair(tmp_path, **SHAPES[shape])
    check_two_blocks(ProposerHarness(pair), pair, 3)
