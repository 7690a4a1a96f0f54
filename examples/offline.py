"""Generate text with the demo pair, with and without DFlash, and compare.

    make demo            or   scripts/run.sh python examples/offline.py --help

Prints some text, tokens per second of both, the acceptance length and whether the outputs are
identical. Runs in float32, where they must be.
"""

import argparse
import json
import os
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

MODELS = Path(__file__).parent.parent / "models" / "demo"


def main() -> None:
    """Run plain decoding, then DFlash, on the same prompts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of a pair")
    parser.add_argument("--prompts", type=int, default=16, help="number of held-out prompts")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt")
    parser.add_argument("--dtype", default="float32", help="bfloat16 is faster, with near-ties")
    parser.add_argument("--verbose", action="store_true", help="show vLLM's log")
    arguments = parser.parse_args()
    if not arguments.verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with (arguments.models / "held_out.jsonl").open() as file:
        prompts = [json.loads(line)["prompt"] for line in file][: arguments.prompts]

    console = Console()
    plain = run(console, "plain decoding", arguments, prompts)
    dflash = run(
        console,
        "DFlash",
        arguments,
        prompts,
        {"method": "dflash", "model": str(arguments.models / "drafter")},
    )
    console.rule("Text written with DFlash")
    for prompt, text in zip(prompts[:2], dflash["texts"], strict=False):
        console.print(prompt[-160:], style="dim", end="", markup=False, highlight=False)
        console.print(text, style="bold", markup=False, highlight=False)
        console.rule()
    report(console, plain, dflash, arguments)


def run(
    console: Console,
    name: str,
    arguments: argparse.Namespace,
    prompts: list[str],
    speculative_config: dict | None = None,
) -> dict:
    """Start an engine, warm it up, generate, and shut it down."""
    from vllm import LLM, SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=arguments.tokens)
    with console.status(f"Starting vLLM, {name} (half a minute; compiles the first time)"):
        llm = LLM(
            model=str(arguments.models / "target"),
            speculative_config=speculative_config,
            dtype=arguments.dtype,
            max_model_len=1024,
            max_num_seqs=max(arguments.concurrency, 1),
        )
    with console.status(f"Generating, {name}"):
        llm.generate(prompts, sampling, use_tqdm=False)  # kernels are prepared on first use
        llm.reset_prefix_cache()
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
    token_ids = [output.outputs[0].token_ids for output in outputs]
    stats = llm.collective_rpc("dflash_stats")[0] if speculative_config else {}
    llm.llm_engine.engine_core.shutdown()
    return {
        "texts": [output.outputs[0].text for output in outputs],
        "token_ids": [list(ids) for ids in token_ids],
        "tokens_per_second": sum(map(len, token_ids)) / seconds,
        "stats": stats,
    }


def report(console: Console, plain: dict, dflash: dict, arguments: argparse.Namespace) -> None:
    """Print the comparison; exits with 1 where float32 outputs differ."""
    same = sum(a == b for a, b in zip(plain["token_ids"], dflash["token_ids"], strict=True))
    total = len(plain["token_ids"])
    stats = dflash["stats"]
    ratio = dflash["tokens_per_second"] / plain["tokens_per_second"]
    table = Table(title=f"{total} prompts, {arguments.concurrency} at a time, {arguments.dtype}")
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column("DFlash", justify="right")
    table.add_row(
        "tokens/s", f"{plain['tokens_per_second']:.0f}", f"{dflash['tokens_per_second']:.0f}"
    )
    table.add_row("speed-up", "", f"{ratio:.2f}x")
    table.add_row("acceptance length", "", f"{stats['mean_acceptance_length']:.2f}")
    table.add_row("identical outputs", "", f"{same} of {total}")
    console.print(table)
    if same < total and arguments.dtype == "float32":
        raise SystemExit("float32 outputs differ: this should never happen, please report it")


if __name__ == "__main__":
    main()
