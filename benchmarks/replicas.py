"""One engine on all cores, or two replicas that share them? Tokens/s over HTTP.

    scripts/run.sh python benchmarks/replicas.py
    scripts/run.sh python benchmarks/replicas.py --narrow --rounds 1 --seconds 2 --concurrency 2

Three sides on the same cores, all with DFlash: `vllm serve` with all threads, one Ray Serve replica
with all threads, and two replicas with half of them each. All sides run side by side. Every round
measures each side once at each concurrency, in a new order. The results are medians of rounds, and
ratios within a round. The demo pair is widened, as in `vllm-dflash bench`.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import httpx
from rich.progress import track

from demo_models import DEMO, HELD_OUT
from paired_rates import Measured, rates_table, write_rates
from soak.behaviours import COMPLETIONS, MODEL
from soak.clients import connected
from soak.soaked_server import SoakServer
from vllm_dflash.tools.arguments import positive
from vllm_dflash.tools.bench.bench_pair import Pair, widened_demo
from vllm_dflash.tools.bench.bench_plan import in_order_of_round
from vllm_dflash.tools.console import print_report, terminable
from vllm_dflash.tools.prompts import read_prompts

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))  # where ray_engines lies

from ray_engines.local_ray import local_ray
from ray_engines.replica_settings import Settings

ENGINE = "vllm serve"


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--narrow", action="store_true", help="the demo pair as it is: HTTP takes most of the time")
    add("--prompts", type=Path, default=HELD_OUT)
    add("--concurrency", type=positive, nargs="+", default=[1, 4, 16])
    add("--rounds", type=positive, default=4)
    add("--warmup-rounds", type=int, default=1)
    add("--seconds", type=float, default=5.0, help="of one measurement")
    add("--tokens", type=positive, default=96, help="new tokens of a request")
    add("--replicas", type=positive, default=2)
    add("--port", type=positive, default=8765, help="of Ray Serve")
    add("--out", type=Path, default=Path("out/replicas"))
    add("vllm_arguments", nargs="*", help="behind --: more arguments of vllm serve")
    return parser.parse_args()


def sides_of(given: argparse.Namespace, pair: Pair) -> dict[str, Settings]:
    """Map a side's name to what runs. The first is one engine without Ray."""
    cores = os.cpu_count() or 1

    def side(replicas: int) -> Settings:
        return Settings(
            model=pair.target,
            drafter=pair.drafter,
            served_model_name=MODEL,
            min_replicas=replicas,
            max_replicas=replicas,
            threads=max(1, cores // replicas),
            vllm_arguments=tuple(given.vllm_arguments),
        )

    def name(replicas: int) -> str:
        return f"{replicas} replica{'s' * (replicas > 1)} x {max(1, cores // replicas)}"

    counts = sorted({1, given.replicas})
    return {ENGINE: side(1)} | {name(count): side(count) for count in counts}


def start(
    stack: ExitStack, sides: dict[str, Settings], given: argparse.Namespace
) -> dict[str, str]:
    """Start everything, one side after the other. Returns URLs."""
    settings = sides[ENGINE]
    server = SoakServer(
        settings.serve_arguments(),
        given.out / "engine.log",
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **settings.environment()},
    )
    server.start()
    stack.callback(server.stop, 60)
    urls = {ENGINE: server.url}
    others = {name: settings for name, settings in sides.items() if name != ENGINE}
    wanted = sum(settings.max_replicas * settings.num_cpus for settings in others.values())
    stack.enter_context(local_ray(wanted, show_log=False))
    from ray import serve

    from ray_engines.application import build

    serve.start(http_options={"host": "127.0.0.1", "port": given.port})
    stack.callback(serve.shutdown)
    for number, (name, settings) in enumerate(others.items()):
        route = f"/side{number}"
        serve.run(build(settings), name=f"side{number}", route_prefix=route)
        urls[name] = f"http://127.0.0.1:{given.port}{route}"
    return urls


async def tokens_per_second(
    url: str, prompts: list[str], concurrency: int, tokens: int, seconds: float
) -> float:
    """Return tokens of all requests over their time. No request begins after `seconds`."""
    waiting, produced, began = iter(prompts * 1000), 0, time.perf_counter()

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal produced
        while time.perf_counter() < began + seconds:
            body = {"model": MODEL, "prompt": next(waiting), "max_tokens": tokens}
            body |= {"temperature": 0.0, "ignore_eos": True}
            answer = await http.post(url + COMPLETIONS, json=body)
            answer.raise_for_status()
            produced += answer.json()["usage"]["completion_tokens"]

    async with connected(url) as http, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client(http))
    return produced / (time.perf_counter() - began)


def measure(urls: dict[str, str], given: argparse.Namespace) -> Measured:
    """Measure tokens/s of each round. Returns (concurrency, side) -> tokens/s."""
    prompts, measured = read_prompts(given.prompts), defaultdict(list)
    rounds = range(-given.warmup_rounds, given.rounds)
    schedule = [(number, count) for number in rounds for count in given.concurrency]
    for number, count in track(schedule, "Measuring"):
        names = list(urls)
        random.Random(f"{number} {count}").shuffle(names)
        for name in names:
            asked = in_order_of_round(prompts, number)
            speed = asyncio.run(
                tokens_per_second(urls[name], asked, count, given.tokens, given.seconds)
            )
            if number >= 0:
                measured[count, name].append(speed)
    return measured


def main() -> None:
    """Measure, print a table, and write it with the raw numbers."""
    given = parse()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.narrow:
        pair = Pair(str(DEMO / "target"), str(DEMO / "drafter"), "demo pair")
    else:
        pair = widened_demo(DEMO, given.out)
    sides = sides_of(given, pair)
    with terminable(), ExitStack() as stack:
        print(f"Starting {1 + sum(s.max_replicas for s in list(sides.values())[1:])} engines")
        measured = measure(start(stack, sides, given), given)
    title = f"Medians of {given.rounds} rounds, {given.tokens} tokens a request"
    table = rates_table(title, [*sides], measured)
    preloaded = os.environ.get("LD_PRELOAD") or "nothing"
    print_report([table], [f"{pair.name}; preloaded: {preloaded}"])
    write_rates(measured, given.out / "replicas.json")
    (given.out / "replicas.md").write_text(table.markdown())


if __name__ == "__main__":
    main()
