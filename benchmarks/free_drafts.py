"""What free drafts bring: the same work with and without them, in one engine.

    scripts/run.sh python benchmarks/free_drafts.py

Uses the demo pair, widened to 203 M parameters. Every round writes the same texts three times, in
turns: with the drafter's blocks and free drafts, with blocks alone, and with neither. All three use
the same costs, which are learned all the time. Prompts are read before the clock starts.
`--native-k 3 --beside ngram` also measures vLLM's own methods, in engines of their own.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from loads.answers import START, LoadsAnswers, importing_benchmarks
from loads.texts import TEXTS
from vllm_dflash.tools.bench.bench_pair import widened_demo
from vllm_dflash.tools.bench.bench_plan import CLOSED, in_order_of_round
from vllm_dflash.tools.bench.bench_report import spread
from vllm_dflash.tools.bench.sides import LOOK_UPS, PLUGIN, make_sides, side_environment
from vllm_dflash.tools.console import print_report
from vllm_dflash.tools.engine_process import EngineProcess
from vllm_dflash.tools.prompts import read_prompts
from vllm_dflash.tools.tables import Table

DEMO = Path(__file__).parents[1] / "models" / "demo"
BOTH, BLOCKS, PLAIN = "both", "blocks alone", "plain"
SIDES = (BOTH, BLOCKS, PLAIN)
Rates = dict[tuple[str, int, str], list[float]]
"""Tokens per second of each round, by load, requests in flight and side."""


class Sources:
    """In our worker: chooses where drafts may come from."""

    drafter: Any

    def draft_from(self, side: str) -> None:
        """Choose one of `SIDES`, or both with free drafts of at most so many tokens.

        What each side has learned about drafts is kept.
        """
        from vllm_dflash.engine.v1.host_step import FixedLength
        from vllm_dflash.planning.planner import Planner

        drafter = self.drafter
        if not hasattr(self, "sources"):
            texts, planner = drafter.host.free_drafts, drafter.host.planner
            blocks = Planner(drafter.width, drafter.max_batch_size, planner.costs)
            self.sources = {
                BOTH: (texts, planner),
                BLOCKS: (None, blocks),
                PLAIN: (None, FixedLength(0)),
            }
        most, host = drafter.mode.most_free, drafter.host
        drafter.most_free = min(int(side), most) if side.isdigit() else most
        host.free_drafts, host.planner = self.sources[BOTH if side.isdigit() else side]


class SourcedAnswers(LoadsAnswers):
    """Answers of an engine whose sources of drafts can be switched."""

    def draft_from(self, side: str) -> None:
        """Tell all workers."""
        self._engine.collective_rpc("draft_from", args=(side,))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", nargs="+", choices=[CLOSED, *TEXTS], default=[*TEXTS])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--tokens", type=int, default=96, help="of a request and round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--most-free", nargs="*", default=[], metavar="N", help="of so many tokens")
    parser.add_argument("--native-k", type=int, nargs="*", default=[], metavar="K")
    parser.add_argument("--beside", nargs="*", choices=[*LOOK_UPS], default=[])
    parser.add_argument("--out", type=Path, default=Path("out/free_drafts"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    pair = widened_demo(DEMO, arguments.out)
    prompts = {name: make() for name, make in TEXTS.items()}
    prompts[CLOSED] = read_prompts(DEMO / "held_out.jsonl")
    path = importing_benchmarks()
    room = {"VLLM_CPU_KVCACHE_SPACE": "3"}  # GiB: prompts are kept
    common: dict[str, Any] = {"model": pair.target, "max_model_len": 1024, "max_num_seqs": 64}
    common["enable_prefix_caching"] = True
    plain, *others = make_sides(pair.drafter, arguments.native_k, arguments.beside)
    peers = [side for side in others if side.plugins == plain.plugins]
    rates: Rates = defaultdict(list)
    with ExitStack() as stack:
        ours = stack.enter_context(
            EngineProcess(
                arguments.out / "engine.log",
                start="free_drafts:SourcedAnswers.start",
                environment=side_environment(PLUGIN) | path | room,
                speculative_config={"method": "dflash", "model": pair.drafter},
                worker_extension_cls="free_drafts.Sources",
                **common,
            )
        )
        engines = dict.fromkeys((*SIDES, *arguments.most_free), ours)
        for peer in peers:
            engines[peer.name] = stack.enter_context(
                EngineProcess(
                    arguments.out / f"{peer.name}.log",
                    start=START,
                    environment=side_environment(peer.plugins) | path | room,
                    speculative_config=peer.speculative_config,
                    **common,
                )
            )
        sides = tuple(engines)
        for number in track(range(-1, arguments.rounds), "Measuring"):  # one to warm up
            for load in arguments.load:
                texts = in_order_of_round(prompts[load], number)
                for count in arguments.concurrency:
                    turn = number % len(sides)
                    for side in sides[turn:] + sides[:turn]:
                        if engines[side] is ours:
                            ours.ask("draft_from", side=side)
                        result = engines[side].ask(
                            "decoding",
                            prompts=texts,
                            concurrency=count,
                            tokens=arguments.tokens,
                            seconds=0.0,  # one batch, all of it
                        )
                        if number >= 0:
                            rates[load, count, side].append(result["tokens_per_second"])
            if number >= 0:  # print after each round, since all take minutes
                print_report([table(rates, f"Same texts, rounds: {number + 1}")])


def table(rates: Rates, title: str) -> Table:
    """Compare the speed with free drafts to each other side: medians and spread."""

    def faster(load: str, count: int, other: str) -> str:
        return spread(np.divide(rates[load, count, BOTH], rates[load, count, other]))

    cells = dict.fromkeys((load, count) for load, count, _ in rates)
    others = dict.fromkeys(side for _, _, side in rates if side != BOTH)
    rows = [
        [load, str(count), *(faster(load, count, other) for other in others)]
        for load, count in cells
    ]
    return Table(title, ["load", "requests", *(f"/ {other}" for other in others)], rows, words=(0,))


if __name__ == "__main__":
    main()
