"""What a request may say about its drafts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from vllm_dflash.config.request_options import most_drafts, request_options


@pytest.mark.parametrize(
    ("extra_args", "most"),
    [
        ({}, None),
        ({"other": 3, "dflashy": 4}, None),
        ({"dflash": None}, None),
        ({"dflash": {}}, None),
        ({"dflash": {"max_drafts": None}}, None),
        ({"dflash": {"max_drafts": 0}}, 0),
        ({"dflash.max_drafts": 2, "kv_transfer_params": {"a": 1}}, 2),
        ({"dflash": {"max_drafts": 5}, "dflash.max_drafts": 3}, 3),
        ({"dflash": {"max_drafts": 2**62}}, 2**31),
    ],
)
def test_what_is_read(extra_args: dict[str, Any], most: int | None) -> None:
    assert most_drafts(extra_args) == most


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"dflash": 3}, 'dflash must be an object, such as {"max_drafts": 0}, not 3.'),
        (
            {"dflash": {"max_drafts": -1}},
            "dflash.max_drafts must be an integer, 0 or more (*), not -1.",
        ),
        (
            {"dflash.max_drafts": "2"},
            "dflash.max_drafts must be an integer, 0 or more (*), not '2'.",
        ),
        (
            {"dflash.max_drafts": 2.0},
            "dflash.max_drafts must be an integer, 0 or more (*), not 2.0.",
        ),
        ({"dflash": {"max_drafts": True}}, "dflash.max_drafts must be an integer, * not True."),
        (
            {"dflash": {"max_draft": 1}},
            "unknown option 'dflash.max_draft'; did you mean 'dflash.max_drafts'? Known:"
            " dflash.max_drafts, an integer, 0 or more (*).",
        ),
        ({"dflash.zzz": 1}, "unknown option 'dflash.zzz'. Known: dflash.max_drafts, *"),
        ({"dflash": {1: 1}}, "unknown option 'dflash.1'. Known: *"),
    ],
)
def test_what_is_refused(extra_args: dict[str, Any], message: str) -> None:
    pattern = re.escape(message).replace(r"\*", ".*")
    with pytest.raises(ValueError, match=f"^{pattern}$"):
        request_options(extra_args)
