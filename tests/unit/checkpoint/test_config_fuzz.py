"""A bad drafter config is refused by the name of the field, or it runs."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from support.cached_drafter import Row, features_of
from support.drafter_harness import DrafterHarness
from support.log_lines import log_lines
from support.pairs import Pair, as_speculators, drafter_config, make_pair, save_drafter
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
    "partial_rotary_factor",
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
    """Draw a config with one to three changed fields, and the names of those fields."""
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
}
"""Other words that a message about a changed field may contain."""


@settings(max_examples=6 * settings().max_examples)
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
    """Return what a user is told, if anything. Other errors are not caught."""
    try:
        parse_config("here", config)
    except DrafterError as refusal:
        return str(refusal)
    return None


def changed(**changes: Any) -> tuple[dict[str, Any], set[str]]:
    return drafter_config(**changes), set(changes)


@settings(
    max_examples=settings().max_examples // 30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(mutations())
@example(changed(max_position_embeddings=1))
@example(changed(dflash_config={"use_swa": True, "swa_window_size": 1}))
@example(changed(num_target_layers=None, rope_parameters=None, rms_norm_eps=None))
@example(changed(head_dim=2))
def test_what_is_not_refused_runs(
    changing_pair: Pair, mutation: tuple[dict[str, Any], set[str]]
) -> None:
    """Run the drafting code itself, with weights that fit the config."""
    config, _ = mutation
    assume(refusal_of(config) is None)
    spec = parse_config("here", config)
    heads = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    columns = spec.intermediate_size + spec.vocab_size + heads
    assume(spec.num_layers * spec.hidden_size * columns < 1 << 24)
    save_drafter(changing_pair.drafter, config)
    with log_lines() as lines:
        try:
            harness = DrafterHarness(changing_pair)
        except Exception as error:
            # It does not fit this target, or vLLM refuses it.
            is_vllms = any("vLLM cannot read" in line for line in lines)
            assert is_vllms or isinstance(error, DrafterError)  # noqa: PT017
            return
    rows = features_of(replace(changing_pair, spec=spec), 40, seed=0)
    drafts = harness.step([Row(0, rows)])
    if spec.positions_go_on or spec.max_position_embeddings > 40 + spec.max_draft_tokens:
        assert len(drafts[0]) == spec.max_draft_tokens
    else:
        assert len(drafts[0]) < spec.max_draft_tokens


@pytest.fixture(scope="module")
def changing_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return a pair whose drafter is rewritten for each example."""
    return make_pair(Path(tmp_path_factory.mktemp("changing")))
