"""Record the demo drafter's drafts at every token of some texts, for the planner's judge.

    scripts/run.sh python benchmarks/record_drafts.py

Plain PyTorch, 3 minutes on one core; writes `tests/data/recorded_drafts.npz`. There are three kinds
of texts: greedy continuations of held-out prompts by the target, which soon repeat themselves;
sampled continuations, which do not; and copies with edits of a document in the prompt. The copies
are forced upon the target, because it is too small to be told to copy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from transformers import AutoTokenizer

from demo_models import DEMO, HELD_OUT
from parity.oracle import Oracle
from vllm_dflash.planning import Floats, Ints
from vllm_dflash.tools.prompts import read_prompts

HERE = Path(__file__).parent
DRAFTS = HERE.parent / "tests" / "data" / "recorded_drafts.npz"
NUM_WRITTEN, NUM_DRAWN, NUM_COPIES, LENGTH = 32, 32, 12, 192
TEMPERATURE = 0.7
PROMPTS_PER_DOCUMENT = 5
EDITED_SHARE = 0.03
"""Share of a document's tokens that is changed; the same share is left out, and inserted."""


def main() -> None:
    """Record, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DRAFTS)
    parsed = parser.parse_args()
    oracle = Oracle.load(str(DEMO / "target"), str(DEMO / "drafter"), torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    prompts = [tokenizer.encode(prompt) for prompt in read_prompts(HELD_OUT)]
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    greedy, drawn, rest = np.split(np.arange(len(prompts)), [NUM_WRITTEN, NUM_WRITTEN + NUM_DRAWN])
    texts = [_written(oracle, prompts[number], do_sample=False) for number in greedy]
    drawing = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0}
    texts += [_written(oracle, prompts[number], **drawing) for number in drawn]
    documents = [prompts[number] for number in rest[: NUM_COPIES * PROMPTS_PER_DOCUMENT]]
    for number in range(0, len(documents), PROMPTS_PER_DOCUMENT):
        document = [*chain(*documents[number : number + PROMPTS_PER_DOCUMENT])][: LENGTH + 32]
        told = tokenizer.encode("\n\n# The same again:\n\n")
        texts.append((document + told, _edited(document, random)[:LENGTH]))
    blocks = [_blocks(oracle, *text) for text in track(texts, "recording")]
    drafts, confidence = (np.concatenate(each) for each in zip(*blocks, strict=True))
    np.savez_compressed(
        parsed.out,
        prompt_lengths=np.array([len(prompt) for prompt, _ in texts], np.uint16),
        lengths=np.array([len(tokens) for _, tokens in texts], np.uint16),
        tokens=np.array([*chain(*chain(*texts))], np.uint16),
        drafts=drafts.astype(np.uint16),  # after each token, text by text
        confidence=np.rint(255 * confidence).astype(np.uint8),
        kinds=np.array([NUM_WRITTEN, NUM_DRAWN, NUM_COPIES]),
    )


@torch.inference_mode()
def _written(oracle: Oracle, prompt: list[int], **how: Any) -> tuple[list[int], list[int]]:
    """Return a prompt, and what the target writes after it."""
    written = oracle.target.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=LENGTH,
        min_new_tokens=LENGTH,
        **how,
    )
    return prompt, written[0, len(prompt) :].tolist()


def _edited(document: Sequence[int], random: np.random.Generator) -> list[int]:
    edited: list[int] = []
    for token in document:
        luck, other = random.random() / EDITED_SHARE, int(random.choice(document))
        if luck >= 1:
            edited.append(token)
        elif luck >= 1 / 3:  # else it is left out
            edited += [other] if luck < 2 / 3 else [other, token]
    return edited


@torch.inference_mode()
def _blocks(oracle: Oracle, prompt: list[int], tokens: list[int]) -> tuple[Ints, Floats]:
    """Draft a block after each of T tokens. Returns drafts and their confidences, [T, K] each."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from support.reference_decoding import draft

    _, features = oracle.text(prompt + tokens, oracle.drafter.spec.taps)
    width = oracle.drafter.spec.max_draft_tokens
    found = []
    for place, bonus in enumerate(tokens, start=len(prompt)):
        logits = draft(oracle.target, oracle.drafter, features[:place], bonus, width)
        found.append(logits.float().softmax(-1).max(dim=-1))
    drafts = torch.stack([oracle.drafter.target_ids(one.indices) for one in found])
    return drafts.numpy(), torch.stack([one.values for one in found]).numpy()


if __name__ == "__main__":
    main()
