"""What a user may write in the speculative config, and when it is for us."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support.configs_by_hand import GPT_OSS
from support.log_lines import log_lines
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.config.speculative_settings import (
    SpeculativeSettings,
    requested_settings,
    written_settings,
)

LEAST = {"method": "dflash", "model": "z-lab/it"}


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be a positive integer, not 0"),
        ({"draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size must be .*, not 0"),
        ({"draft_length": "long"}, "draft_length must be 'adaptive' .*, not 'long'"),
        ({"draft_window": 0}, "draft_window must be a positive number of tokens .*, not 0"),
        ({"draft_window": "all"}, "draft_window must be a positive number .*, not 'all'"),
        ({"draft_window": True}, "draft_window must be a positive number .*, not True"),
        ({"draft_window": 3.0}, r"draft_window must be a positive number .*, not 3\.0"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens must be .* integer, not True"),
        ({"draft_tensor_parallel_size": True}, "draft_tensor_parallel_size must be .*, not True"),
        ({"drafter_overrides": [1]}, r"drafter_overrides must be an object .*, not \[1\]"),
        ({"free_drafts": "on"}, "free_drafts must be .* or 'off', not 'on'"),
        ({"draft_tree": 0}, "draft_tree must be 'off' .* up to 64, not 0"),
        ({"draft_tree": 65}, "draft_tree must be 'off' .* up to 64, not 65"),
        ({"draft_tree": True}, "draft_tree must be 'off' .*, not True"),
        ({"revision": 3}, "revision must be .*, not 3"),
        ({"model": None}, "needs a drafter: add 'model'"),
        ({"draft_lenght": 3}, "unknown option 'draft_lenght' .* did you mean 'draft_length'"),
        ({"draft_sample_metod": 3}, "unknown option .* did you mean 'draft_sample_method'"),
        ({"zzz": 3}, r"unknown option 'zzz' .*Known: \[.*'draft_length', .*'method', .*'model'"),
        ({"use_heterogeneous_vocab": True}, "^remove 'use_heterogeneous_vocab' from"),
    ],
)
def test_what_is_refused(written: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SpeculativeSettings.from_config({**LEAST, **written})


@pytest.mark.parametrize(
    ("asked", "anchored", "tokens", "words"),
    [
        (None, False, 7, ""),  # in a block of 8, one is the bonus token
        (1, False, 1, ""),
        (7, False, 7, ""),
        (9, False, 7, "block_size 8, which includes the bonus token."),
        (None, True, 8, ""),
        (9, True, 8, "block_size 8."),
    ],
)
def test_draft_tokens(asked: int | None, anchored: bool, tokens: int, words: str) -> None:
    nested = {**GPT_OSS["dflash_config"], "sample_from_anchor": anchored}
    drafter = parse_config("it", {**GPT_OSS, "dflash_config": nested})
    with log_lines() as lines:
        settings = SpeculativeSettings(model="it", num_speculative_tokens=asked)
        assert settings.draft_tokens(drafter) == tokens
    assert len(lines) == bool(words)
    for line in lines:
        assert f"is {asked}, but at most {tokens} tokens are drafted" in line
        assert line.endswith(words)


def arguments(config: dict[str, Any] | None = None, **flags: Any) -> Any:
    plain = {"spec_method": None, "spec_model": None, "spec_tokens": None}
    return SimpleNamespace(speculative_config=config, **{**plain, **flags})


def test_dashes_are_underscores() -> None:
    written = {"draft-length": "fixed", "num_speculative-tokens": 3}
    args = arguments(written)
    copy = written_settings(args)
    assert copy == {"draft_length": "fixed", "num_speculative_tokens": 3}
    copy["model"] = "it"
    assert args.speculative_config == {"draft-length": "fixed", "num_speculative-tokens": 3}
    assert written_settings(arguments(None)) == {}


@pytest.mark.parametrize(
    ("config", "flags", "requested"),
    [
        (LEAST, {}, LEAST),
        ({"method": "dflash"}, {}, {"method": "dflash"}),  # lacks a model, which is reported later
        (
            None,
            {"spec_method": "dflash", "spec_model": "it", "spec_tokens": 3},
            {"method": "dflash", "model": "it", "num_speculative_tokens": 3},
        ),
        # The config comes before a flag.
        (
            {"method": "dflash", "model": "a", "num_speculative_tokens": 2},
            {"spec_method": "eagle", "spec_model": "b", "spec_tokens": 3},
            {"method": "dflash", "model": "a", "num_speculative_tokens": 2},
        ),
        ({"method": "eagle3", "model": "some-dflash"}, {}, None),
        ({"method": "eagle", "model": "a"}, {"spec_method": "dflash"}, None),
        (None, {}, None),
        # Without a method, vLLM goes by the name.
        ({"model": "z-lab/Qwen3-8B-DFlash-b16"}, {}, {"model": "z-lab/Qwen3-8B-DFlash-b16"}),
        (None, {"spec_model": "a/dflash"}, {"model": "a/dflash"}),
        ({"model": "a/dspark_dflash"}, {}, {"model": "a/dspark_dflash"}),
        ({"model": "z-lab/Qwen3-8B"}, {}, None),
        ({"model": "a/eagle-dflash"}, {}, None),
        ({"model": "a/dflash-EAGLE3"}, {}, None),
        ({"model": "my_dflash.Proposer"}, {}, None),
        ({"model": "a/eagle4-dflash"}, {}, {"model": "a/eagle4-dflash"}),
        ({"num_speculative_tokens": 3}, {}, None),
    ],
)
def test_which_settings_select_dflash(
    config: dict[str, Any] | None, flags: dict[str, Any], requested: dict[str, Any] | None
) -> None:
    assert requested_settings(arguments(config, **flags)) == requested


def test_a_vllm_without_these_flags() -> None:
    plain: Any = SimpleNamespace(speculative_config=None)
    assert requested_settings(plain) is None
    drafted: Any = SimpleNamespace(speculative_config={"method": "dflash", "model": "it"})
    assert requested_settings(drafted) == {"method": "dflash", "model": "it"}


def test_off_without_quotes_in_yaml() -> None:
    """vLLM reads `--config` as YAML 1.1, where it is false."""
    settings = SpeculativeSettings.from_config({**LEAST, "free_drafts": False, "draft_tree": False})
    assert (settings.free_drafts, settings.draft_tree) == ("off", "off")
    with pytest.raises(ValueError, match="free_drafts must be"):
        SpeculativeSettings.from_config({**LEAST, "free_drafts": True})
