"""Requests of an engine that is stepped by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm import LLM, SamplingParams


class Stepped:
    """Requests by name, and the tokens that each step brought them."""

    def __init__(self, llm: LLM) -> None:
        self.core = llm.llm_engine
        self.steps: dict[str, list[list[int]]] = {}
        self.ended: dict[str, str | None] = {}

    def add(self, name: str, prompt: str | list[int], params: SamplingParams) -> None:
        asked: Any = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        self.core.add_request(name, asked, params)
        self.steps[name] = []

    def step(self) -> None:
        for output in self.core.step():
            name, one = output.request_id, output.outputs[0]
            if new := list(one.token_ids)[len(self.tokens(name)) :]:
                self.steps[name].append(new)
            self.ended[name] = one.finish_reason

    def finish(self, check: Callable[[], object] = lambda: None) -> None:
        """Step until no request is left; call `check` after each step."""
        while self.core.has_unfinished_requests():
            self.step()
            check()

    def until(self, num_steps: int, *names: str) -> None:
        """Step until each of these requests has got tokens in so many steps."""
        while min(len(self.steps[name]) for name in names) < num_steps:
            self.step()

    def tokens(self, name: str) -> list[int]:
        return [token for step in self.steps[name] for token in step]

    def counts(self, name: str) -> list[int]:
        """Return how many tokens each step brought."""
        return [*map(len, self.steps[name])]


def run_by_hand(
    llm: LLM,
    prompts: list[Any],
    params: SamplingParams,
    check: Callable[[], object] = lambda: None,
) -> Stepped:
    """Run requests, named by their numbers, to their ends; call `check` after each step."""
    stepped = Stepped(llm)
    for number, prompt in enumerate(prompts):
        stepped.add(str(number), prompt, params)
    stepped.finish(check)
    return stepped


def tokens_by_step(llm: LLM, prompts: list[Any], params: SamplingParams) -> list[list[list[int]]]:
    """Return the tokens of each step for each prompt, cut at its end."""
    return [*run_by_hand(llm, prompts, params).steps.values()]


def joined(steps: list[list[list[int]]]) -> list[list[int]]:
    """Return the whole text of each prompt, from the tokens of its steps."""
    return [[token for step in of_prompt for token in step] for of_prompt in steps]
