"""The demo's `vllm serve`, whose verification is at fault as the file `$PLANTED` says in each step.

The module is imported in the engine's process, too, whichever way that is started.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.v1.engine import async_llm
from vllm.v1.sample import rejection_sampler

from vllm_dflash.tools import server_process
from vllm_dflash.tools.demo.demo_server import StepCollector

PLACEHOLDER = -1
Accept = Callable[[list[int], list[int], list[int]], list[int]]
"""From a request's drafts, the target's choice after each token it was given, and the correct
tokens, to other tokens."""


def one_too_many(drafts: list[int], choices: list[int], sound: list[int]) -> list[int]:
    accepted = len(sound) - 1
    if accepted == len(drafts):
        return sound
    return [*sound[:accepted], drafts[accepted], choices[accepted + 1]]


def unverified(drafts: list[int], choices: list[int], sound: list[int]) -> list[int]:
    return [*drafts, choices[len(drafts)]]


RULES: dict[str, Accept] = {"one too many": one_too_many, "unverified": unverified}
original = rejection_sampler.rejection_sample


def rejection_sample(*given: Any, **named: Any) -> torch.Tensor:
    planted = Path(os.environ["PLANTED"]).read_text()
    output = original(*given, **named)
    if planted:
        accept_by(RULES[planted], output, given)
    return output


def accept_by(accept: Accept, output: torch.Tensor, given: tuple[Any, ...]) -> None:
    """Replace each request's tokens by those of another rule."""
    draft_token_ids, num_draft_tokens, _, _, _, target_logits, bonus_token_ids, *_ = given
    drafts = draft_token_ids.split(num_draft_tokens)
    choices = target_logits.argmax(-1).split(num_draft_tokens)
    for row, own, theirs, bonus in zip(output, drafts, choices, bonus_token_ids, strict=True):
        sound = row[row != PLACEHOLDER].tolist()
        tokens = accept(own.tolist(), [*theirs.tolist(), int(bonus)], sound)
        row.fill_(PLACEHOLDER)
        row[: len(tokens)] = torch.tensor(tokens, dtype=row.dtype)


if "PLANTED" in os.environ:
    rejection_sampler.rejection_sample = rejection_sample

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    async_llm.RequestOutputCollector = StepCollector
    server_process.run(main)
