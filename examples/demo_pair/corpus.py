"""The text the demo pair is trained on: the Python standard library's own source."""

import json
import random
import sysconfig
from pathlib import Path

# Tables and generated text teach a small model nothing; tests are not installed everywhere.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
LEFT_OUT |= {"encodings", "pydoc_data", "__pycache__", "lib2to3", "__phello__"}
HELD_OUT_EVERY = 20


def read_corpus() -> tuple[list[str], list[str]]:
    """Return (training files, held-out files) as texts; every 20th file is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    training: list[str] = []
    held_out: list[str] = []
    paths = (p for p in root.rglob("*.py") if not LEFT_OUT & set(p.relative_to(root).parts))
    for number, path in enumerate(sorted(paths)):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            (held_out if number % HELD_OUT_EVERY == 7 else training).append(text)
    return training, held_out


def write_held_out(texts: list[str], out: Path, count: int = 200) -> None:
    """Write prompts from the held-out files as JSON lines. The pair is measured on them."""
    prompts = dict.fromkeys(cut_prompts(texts, count, seed=1))
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    out.write_text("".join(lines))


def cut_prompts(texts: list[str], count: int, *, lines: int = 12, seed: int = 0) -> list[str]:
    """Cut `count` prompts of a few whole lines each, evenly over the texts, at random places."""
    rng = random.Random(seed)
    split = [text.splitlines(keepends=True) for text in texts]
    split = [file_lines for file_lines in split if len(file_lines) > 2 * lines]
    prompts = []
    for number in range(count):
        file_lines = split[number % len(split)]
        length = rng.randint(lines // 2, lines)
        start = rng.randrange(len(file_lines) - length)
        prompts.append("".join(file_lines[start : start + length]))
    return prompts
