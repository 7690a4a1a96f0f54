"""What drafters of packaged targets are trained on, and what it is not."""

from __future__ import annotations

from packaged_pairs import code_prompts
from packaged_pairs.prompts import is_held_out, write_prompts


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
