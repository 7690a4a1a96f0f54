"""Generate text offline with DFlash: vLLM's `LLM`, with one more dictionary.

    scripts/run.sh python examples/offline.py
    scripts/run.sh python examples/offline.py --target Qwen/Qwen3-8B \\
        --drafter z-lab/Qwen3-8B-DFlash-b16 --prompts prompts.txt

`vllm-dflash demo` compares its speed with plain decoding.
"""

import argparse
import os
from pathlib import Path

DEMO = Path(__file__).parent.parent / "models" / "demo"
PROMPTS = ["def quicksort(items):\n", "class LruCache:\n", "import os\n\n\ndef read_file(path):\n"]


def main() -> None:
    """Continue some prompts, and print the acceptance length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=str(DEMO / "target"), help="folder or repository")
    parser.add_argument("--drafter", default=str(DEMO / "drafter"), help="folder or repository")
    parser.add_argument("--prompts", type=Path, help="a file with one a line (default: 3 of code)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    try:
        prompts = arguments.prompts.read_text().splitlines() if arguments.prompts else PROMPTS
        llm = LLM(
            model=arguments.target,
            speculative_config={"method": "dflash", "model": arguments.drafter},
            max_model_len=1024,
        )
    except (OSError, ValueError) as error:  # no such folder, or a pair that does not fit
        parser.exit(2, f"{str(error).splitlines()[0]}\n")
    sampling = SamplingParams(temperature=0.0, max_tokens=arguments.tokens)
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        print(f"{'-' * 72}\n{output.prompt}{output.outputs[0].text}")
    stats = llm.collective_rpc("dflash_stats")[0]
    print(f"{'-' * 72}\nacceptance length {stats['mean_acceptance_length']:.2f}")


if __name__ == "__main__":
    main()
