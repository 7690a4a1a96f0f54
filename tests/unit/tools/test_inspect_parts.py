"""What `vllm-dflash inspect` counts as a drafter's weights on each rank."""

from __future__ import annotations

from support.pairs import drafter_config
from vllm_dflash.checkpoint.headers import Tensor
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.tools.inspect.memory import loaded_weights


def test_ranks_divide_the_weights() -> None:
    """Two ranks halve all but the context's projection and the norms; a head is never halved."""
    spec = parse_config("it", drafter_config(num_key_value_heads=1))
    one, two = loaded_weights(spec, {}, 2, 1), loaded_weights(spec, {}, 2, 2)
    kept_rows = spec.hidden_size * len(spec.taps) * spec.hidden_size + 2 * spec.hidden_size  # norms
    per_layer = 2 * spec.hidden_size + 2 * spec.head_dim  # norms
    per_layer += 2 * spec.head_dim * spec.hidden_size  # the only key/value head
    stacked = 2 * spec.head_dim * spec.hidden_size + spec.head_dim  # the same, for the context
    kept = 2 * (kept_rows + spec.num_layers * (per_layer + stacked))
    assert two - kept == (one - kept) / 2


def test_all_ranks_share_a_vocabulary_of_its_own() -> None:
    """Even if the layers do not divide and are whole on each rank."""
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3}
    spec = parse_config("it", drafter_config(**shape))
    own = {"embed_tokens.weight": Tensor((spec.vocab_size, spec.hidden_size), "F32")}
    for ranks in (1, 2, 4):
        layers, whole = (loaded_weights(spec, found, 4, ranks) for found in ({}, own))
        assert whole - layers == spec.vocab_size // ranks * spec.hidden_size * 4
