"""Tokens of a verify step: forced draft trees beside chains, on one pair, float32 and greedy.

    scripts/run.sh python benchmarks/tree_acceptance.py

Texts of trees and chains are compared: they are plain decoding's, whatever is verified. Exits with
1 where any token differs.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.progress import track

from vllm_dflash.tools.bench.sides import NO_PLUGIN, PLUGIN, side_environment
from vllm_dflash.tools.console import print_report
from vllm_dflash.tools.engine_process import EngineProcess
from vllm_dflash.tools.prompts import read_prompts
from vllm_dflash.tools.tables import Table

DEMO = Path(__file__).parent.parent / "models" / "demo"


def main() -> None:
    """Decode with each kind of drafts, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--drafter", type=Path, default=DEMO / "drafter")
    parser.add_argument("--prompts", type=Path, default=DEMO / "held_out.jsonl")
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, nargs="+", default=[7, 15, 31, 64])
    parser.add_argument("--out", type=Path, default=Path("out/tree_acceptance"))
    arguments = parser.parse_args()
    prompts = read_prompts(arguments.prompts, arguments.count)
    engine: dict[str, Any] = {"model": str(arguments.target), "dtype": "float32"}
    engine |= {"max_model_len": 512, "max_num_seqs": 8, "disable_log_stats": False}
    fixed = {"method": "dflash", "model": str(arguments.drafter), "draft_length": "fixed"}
    kinds: dict[str, dict[str, Any] | None] = {"plain": None, "chain": fixed}
    kinds |= {f"tree of {nodes}": {**fixed, "draft_tree": nodes} for nodes in arguments.nodes}
    texts, rows = [], []
    for name, speculative in track(kinds.items(), "Decoding"):
        own: dict[str, Any] = {"speculative_config": speculative} if speculative else {}
        environment = side_environment(PLUGIN if speculative else NO_PLUGIN)
        log = arguments.out / f"{name.replace(' ', '-')}.log"
        with EngineProcess(log, environment=environment, **engine, **own) as child:
            answer = child.answers.generate(prompts=prompts, tokens=arguments.tokens)
        texts.append(answer["token_ids"])
        if speculative:
            counts = answer["counts"]
            length = 1 + counts["accepted_tokens"] / max(1, counts["drafts"])
            same = sum(a == b for a, b in zip(texts[0], texts[-1], strict=True))
            rows.append([name, f"{length:.2f}", f"{same} of {len(prompts)}"])
    heads = ["drafts", "tokens of a verify step", "texts of plain decoding"]
    print_report([Table("Draft trees", heads, rows, words=(0,))])
    raise SystemExit(any(text != texts[0] for text in texts))


if __name__ == "__main__":
    main()
