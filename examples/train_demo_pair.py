"""Train the demo pair: a small Qwen3 target and its DFlash drafter, from this machine's Python.

    scripts/run.sh python examples/train_demo_pair.py --out models/demo

Takes about 50 minutes on 2 CPU cores. Text: the source of the Python standard library. Code for
this pair is in `examples/demo_pair/`, the training of drafters in `examples/drafter_training/`.
"""

import argparse
import sys
from pathlib import Path

from rich.progress import Progress
from transformers import AutoTokenizer
from vllm import LLM

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # where the reference lies

from demo_pair.corpus import cut_prompts, read_corpus, write_held_out
from demo_pair.drafter import train_drafter
from demo_pair.target import train_target
from drafter_training.continuations import write_continuations

FOLDERS = {"dflash": "drafter", "dflash2": "drafter2", "lilicorr": "lilicorr"}
"""Folder of each architecture's drafter."""
PROMPT_TOKENS, NEW_TOKENS = 96, 128
"""Tokens of each prompt, and tokens that the target writes after it."""


def main() -> None:
    """Run the three steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/demo"))
    parser.add_argument("--target-minutes", type=float, default=18)
    parser.add_argument("--prompts", type=int, default=16_000)
    parser.add_argument("--drafter-minutes", type=float, default=22)
    parser.add_argument("--drafter-steps", type=int, help="instead of minutes")
    parser.add_argument("--start", type=Path, help="a drafter whose layers are trained further")
    parser.add_argument("--target", type=Path, help="an existing one: train drafters alone")
    parser.add_argument(
        "--architecture",
        nargs="+",
        choices=[*FOLDERS],
        default=["dflash"],
        help="of the drafter; of several, each is trained on the same text",
    )
    arguments = parser.parse_args()
    target = arguments.target or arguments.out / "target"
    arguments.out.mkdir(parents=True, exist_ok=True)

    training, held_out = read_corpus()
    write_held_out(held_out, arguments.out / "held_out.jsonl")
    if arguments.target is None:
        target.mkdir(exist_ok=True)
        with Progress() as progress:
            minutes = arguments.target_minutes
            train_target(training, held_out, target, minutes=minutes, progress=progress)
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = cut_prompts(training, arguments.prompts)
    ids = [tokenizer(prompt)["input_ids"][:PROMPT_TOKENS] for prompt in prompts]
    llm = LLM(model=str(target), max_model_len=512, max_num_seqs=128, seed=0)
    pairs = write_continuations(llm, ids, NEW_TOKENS)
    for architecture in arguments.architecture:
        drafter = arguments.out / FOLDERS[architecture]
        with Progress() as progress:
            train_drafter(
                target,
                pairs,
                tokenizer.mask_token_id,
                drafter,
                architecture=architecture,
                minutes=arguments.drafter_minutes,
                steps=arguments.drafter_steps,
                start=arguments.start,
                progress=progress,
            )
    print(f"Wrote a pair. Try it: vllm-dflash demo --target {target} --drafter {drafter}")


if __name__ == "__main__":
    main()
