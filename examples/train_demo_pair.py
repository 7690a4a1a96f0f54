"""Train the demo pair: a small Qwen3 target and its DFlash drafter, from this machine's Python.

    scripts/run.sh python examples/train_demo_pair.py --out models/demo

Takes about 50 minutes on 2 CPU cores. Text: the source of the Python standard library. The three
steps are one file each in `examples/demo_pair/`.
"""

import argparse
from pathlib import Path

from rich.progress import Progress
from transformers import AutoTokenizer

from demo_pair.continuations import write_continuations
from demo_pair.corpus import cut_prompts, read_corpus, write_held_out
from demo_pair.drafter import train_drafter
from demo_pair.target import train_target


def main() -> None:
    """Run the three steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/demo"))
    parser.add_argument("--target-minutes", type=float, default=18)
    parser.add_argument("--prompts", type=int, default=16_000)
    parser.add_argument("--drafter-minutes", type=float, default=22)
    arguments = parser.parse_args()
    target, drafter = arguments.out / "target", arguments.out / "drafter"
    target.mkdir(parents=True, exist_ok=True)

    training, held_out = read_corpus()
    write_held_out(held_out, arguments.out / "held_out.jsonl")
    with Progress() as progress:
        minutes = arguments.target_minutes
        train_target(training, held_out, target, minutes=minutes, progress=progress)
    pairs = write_continuations(target, cut_prompts(training, arguments.prompts))
    mask_token_id = AutoTokenizer.from_pretrained(target).mask_token_id
    with Progress() as progress:
        minutes = arguments.drafter_minutes
        train_drafter(target, pairs, mask_token_id, drafter, minutes=minutes, progress=progress)
    print(f"Wrote a pair. Try it: vllm-dflash demo --target {target} --drafter {drafter}")


if __name__ == "__main__":
    main()
