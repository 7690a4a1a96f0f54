"""Options of a single request, in `SamplingParams.extra_args` or in `vllm_xargs` over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from vllm_dflash.checkpoint.refusal import LARGEST, checked, described, nearest, shown

KEY = "dflash"
"""Key of a dictionary of options. vLLM's `vllm_xargs` takes no dictionaries: there, and wherever
one likes, each option is a key of its own, `dflash.` before its name."""


class RequestOptions(BaseModel):
    """Options that a request may have."""

    model_config = ConfigDict(strict=True)

    max_drafts: int | None = described(
        None,
        "an integer, 0 or more (the most drafts that a step verifies; 0: plain decoding)",
        ge=0,
        alias=f"{KEY}.max_drafts",
    )


KNOWN = {field.alias or name: field for name, field in RequestOptions.model_fields.items()}


def request_options(extra_args: Mapping[str, Any]) -> RequestOptions:
    """Check the options of a request. Keys that are not ours are left alone.

    Raises:
        ValueError: the message names the key, and says what is allowed.
    """
    prefix = f"{KEY}."
    options = extra_args.get(KEY)
    if not isinstance(options, Mapping | None):
        raise ValueError(
            f'{KEY} must be an object, such as {{"max_drafts": 0}}, not {shown(options)}.'
        )
    written = {f"{prefix}{name}": value for name, value in (options or {}).items()}
    written |= {key: value for key, value in extra_args.items() if key.startswith(prefix)}
    for key in written:
        if key not in KNOWN:
            near = nearest(key, KNOWN)
            hint = f"; did you mean {near!r}?" if near else "."
            known = "; ".join(f"{name}, {field.description}" for name, field in KNOWN.items())
            raise ValueError(f"unknown option {shown(key)}{hint} Known: {known}.")
    try:
        return checked(RequestOptions, written, said="not {}")
    except ValueError as error:
        raise ValueError(f"{error}.") from None


def most_drafts(extra_args: Mapping[str, Any]) -> int | None:
    """Most drafts of a request that a step may verify; None: it says nothing."""
    most = request_options(extra_args).max_drafts
    return None if most is None else min(most, LARGEST)  # larger ones overflow arrays
