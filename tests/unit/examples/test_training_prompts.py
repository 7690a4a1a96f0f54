"""What drafters of packaged targets are trained on, and what it is not."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

from drafter_training.answers import without_repeats
from packaged_pairs import code_prompts
from packaged_pairs.prompts import as_token_ids, is_held_out, write_prompts


def test_prompts_are_the_same_each_time_and_no_subject_is_on_both_sides() -> None:
    training, held_out, chat = write_prompts()
    assert (training, held_out, chat) == write_prompts()
    assert len(training) == len(set(training)) > 5000
    assert not set(training) & set(held_out)
    assert len(held_out) > 100
    assert {*chat} < {*held_out}
    assert len(chat) > 100
    assert not [prompt for prompt in chat if "def " in prompt]
    hidden = {task for task, _ in code_prompts.instructions() if is_held_out(task)}
    assert hidden
    assert not [prompt for prompt in training if any(f"{task}." in prompt for task in hidden)]


def test_examples_in_stubs_are_valid_python_and_right() -> None:
    prompts = dict(code_prompts.stubs())
    assert len(prompts) > 900
    for prompt in prompts.values():
        ast.parse(re.findall(r"(?s)((?:from|def) .*\"\"\")", prompt)[0])
    assert "count_even_of([5, 5, 18, 21, -3, 44])\n    2\n" in prompts["count_even_of"]


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ([*range(40)], [*range(40)]),
        ([7, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3], [7, 8, 1, 2, 3, 1, 2, 3]),
        ([5, 1, 1, 1], [5, 1, 1, 1]),  # a few equal tokens are no loop
        ([5] + [1] * 30, [5, 1, 1]),
    ],
)
def test_an_answer_that_ends_in_a_loop_is_cut(answer: list[int], kept: list[int]) -> None:
    assert without_repeats(answer) == kept


class Letters:
    """A tokenizer whose tokens are letters."""

    bos_token = "^"

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[str]]:
        assert not add_special_tokens  # the template has them
        return {"input_ids": texts}

    def apply_chat_template(self, chats: list[Any], **options: Any) -> list[str]:
        return [f"<user>{chat[0]['content']}<assistant>" for chat in chats]


@pytest.mark.parametrize(
    ("template", "prompt"), [("a template", "<user>Why?<assistant>"), (None, "^Why?\n\n")]
)
def test_a_target_without_a_chat_template_continues_a_text(
    template: str | None, prompt: str
) -> None:
    assert as_token_ids(Letters(template), ["Why?"]) == [prompt]
