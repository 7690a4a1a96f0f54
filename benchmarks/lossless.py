"""float32, greedy: is DFlash's output plain vLLM's, token for token?

    scripts/run.sh python benchmarks/lossless.py

Runs every prompt at several concurrencies, with small chunks of prefill and prefix caching on. It
runs twice, so that the second time hits the prefix cache. Exits with 1 if any token differs.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.progress import track

from vllm_dflash.tools.bench.sides import NO_PLUGIN, side_environment
from vllm_dflash.tools.engine_process import EngineProcess
from vllm_dflash.tools.prompts import read_prompts

DEMO = Path(__file__).parent.parent / "models" / "demo"


def main() -> None:
    """Compare and print one line per setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, default=DEMO)
    parser.add_argument("--prompts", type=Path, default=DEMO / "held_out.jsonl")
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("out/lossless"))
    arguments = parser.parse_args()
    prompts = read_prompts(arguments.prompts, arguments.count)
    engine: dict[str, Any] = {
        "model": str(arguments.pair / "target"),
        "dtype": "float32",
        "max_model_len": 512,
    }
    # Cache blocks are smaller than the prompts, or there would be no prefix to hit.
    engine |= {"disable_log_stats": False, "block_size": 32}
    without_ours = side_environment(NO_PLUGIN)
    with EngineProcess(arguments.out / "plain.log", environment=without_ours, **engine) as child:
        expected = child.answers.generate(prompts=prompts, tokens=arguments.tokens)["token_ids"]
    differing = 0
    settings = [(1, 64), (8, 48), (32, 64)]
    for concurrency, batched_tokens in track(settings, "Comparing"):
        log = arguments.out / f"dflash-{concurrency}.log"
        with EngineProcess(
            log,
            environment=side_environment(),
            **engine,
            speculative_config={"method": "dflash", "model": str(arguments.pair / "drafter")},
            max_num_seqs=concurrency,
            max_num_batched_tokens=batched_tokens,
            enable_prefix_caching=True,
        ) as child:
            for attempt in ("cold", "cached prefixes"):
                answer = child.answers.generate(prompts=prompts, tokens=arguments.tokens)
                wrong = sum(
                    ours != plain for ours, plain in zip(answer["token_ids"], expected, strict=True)
                )
                differing += wrong
                counts = answer["counts"]
                length = 1 + counts["accepted_tokens"] / max(1, counts["drafts"])
                print(
                    f"concurrency {concurrency:2}, {batched_tokens} tokens a step, {attempt}:"
                    f" {len(prompts) - wrong} of {len(prompts)} identical,"
                    f" acceptance length {length:.2f}"
                )
    raise SystemExit(1 if differing else 0)


if __name__ == "__main__":
    main()
