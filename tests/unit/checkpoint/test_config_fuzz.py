"""Whatever is wrong in a drafter's config: it is refused by the name of the field, or it runs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from support.drafter_harness import DrafterHarness, Row
from support.pairs import as_speculators, drafter_config, make_pair, save_drafter
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterError

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([0, -1, 1 << 20, 1 << 40, 10**30, 0.5, -1.5, float("inf"), "", "nonsense"]),
    st.just([]),
    st.just({}),
    st.lists(st.integers(-2, 9), max_size=4),
    st.sampled_from([["sliding_attention", "full_attention"], ["nonsense"], {"a": {}}, "yarn"]),
)
EXTRA = (
    "sliding_window",
    "layer_types",
    "is_causal",
    "attention_bias",
    "draft_vocab_size",
    "target_hidden_size",
    "rope_scaling",
    "rope_theta",
    "is_neox_style",
    "logit_scale",
    "quantization_config",
)
NESTED = (
    "mask_token_id",
    "target_layer_ids",
    "block_size",
    "causal",
    "use_swa",
    "swa_window_size",
    "attention_sink_bias",
    "attention_value_scale",
    "sample_from_anchor",
    "use_aux_hidden_state",
)


@st.composite
def mutations(draw: st.DrawFn) -> tuple[dict[str, Any], set[str]]:
    """A config with one to three fields changed, and the names of those."""
    config = drafter_config()
    changed = set()
    for _ in range(draw(st.integers(1, 3))):
        nested = draw(st.booleans()) and isinstance(config["dflash_config"], dict)
        name = draw(st.sampled_from(NESTED if nested else (*config, *EXTRA)))
        where = config["dflash_config"] if nested else config
        where[name] = copy.deepcopy(draw(JUNK))
        changed.add(name)
    return config, changed


ABOUT = {
    "dflash_config": {"mask_token_id", "target_layer_ids"},
    "layer_types": {"sliding", "num_hidden_layers"},
    "use_swa": {"swa_window_size"},
    "num_hidden_layers": {"layer_types"},
    "rope_parameters": {"rope_type", "rope_theta", "rope_scaling"},
    "rope_scaling": {"rope_parameters", "rope_type", "factor"},
    "hidden_size": {"head_dim"},
    "num_attention_heads": {"head_dim", "num_key_value_heads"},
    "num_key_value_heads": {"num_attention_heads"},
    "quantization_config": {"quantised"},
}
"""Other words that say what is wrong where a field was changed."""


@settings(max_examples=600, deadline=None)
@given(mutations(), st.booleans())
def test_a_bad_config_is_refused_by_the_name_of_a_field(
    mutation: tuple[dict[str, Any], set[str]], speculators: bool
) -> None:
    config, changed = mutation
    if speculators and isinstance(config["dflash_config"], dict):
        nested = config["dflash_config"].get("target_layer_ids")
        whole = isinstance(nested, list) and all(isinstance(tap, int) for tap in nested)
        if whole and isinstance(config.get("block_size"), int):
            config = as_speculators(config)
            changed |= {"aux_hidden_state_layer_ids"}
    message = refusal_of(config)
    words = changed.union(*(ABOUT.get(name, set()) for name in changed))
    assert message is None or any(word in message for word in words), (message, changed)


def refusal_of(config: dict[str, Any]) -> str | None:
    """What a user is told, if anything; any other error is not caught."""
    try:
        parse_config("here", config)
    except DrafterError as refusal:
        return str(refusal)
    return None


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(mutations())
def test_what_is_not_refused_runs(tmp_path_factory: pytest.TempPathFactory, mutation: Any) -> None:
    """In the drafting code itself, with weights that fit the config."""
    config, _ = mutation
    assume(refusal_of(config) is None)
    spec = parse_config("here", config)
    size = spec.num_layers * spec.hidden_size * (spec.intermediate_size + spec.vocab_size)
    assume(size < 1 << 24)
    pair = make_pair(Path(tmp_path_factory.mktemp("pair")))
    save_drafter(pair.drafter, config)
    try:
        harness = DrafterHarness(pair)
    except ValueError:  # it does not fit this target, or vLLM itself refuses the config
        return
    width = len(spec.taps) * spec.target_hidden_size
    drafts = harness.step([Row(0, torch.randn(40, width))])
    assert len(drafts[0]) == spec.max_draft_tokens
