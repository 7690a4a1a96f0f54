"""Measures servers in turns, with the client of `vllm bench serve` in this process."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO
from urllib.request import proxy_bypass

from vllm_dflash.tools.bench.bench_result import Record
from vllm_dflash.tools.bench.sides import PLUGIN, Side
from vllm_dflash.tools.completions import read_metrics
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.server import HOST, Server, flag_names

TOKEN_TIME = "vllm:request_time_per_output_token_seconds"
METRICS = (f"{TOKEN_TIME}_sum", f"{TOKEN_TIME}_count", "vllm:num_preemptions_total")
"""Sum and number of the requests' mean times of a token after the first; interruptions."""


@dataclass(frozen=True)
class Cell:
    """A measurement that every round makes once on each server."""

    load: str
    concurrency: int
    """Requests in flight."""
    flags: tuple[str, ...]
    """Flags of `vllm bench serve`: target, prompts, lengths of answers, sampling."""

    def __str__(self) -> str:
        return f"{self.load}, concurrency {self.concurrency}"


def read_early(cell: Cell) -> None:
    """Let vLLM read the prompts of a cell before servers start.

    Raises:
        ValueError: it cannot.
    """
    from vllm.benchmarks.datasets import get_samples
    from vllm.tokenizers import get_tokenizer

    parsed = parse_client_flags(cell.flags)
    tokenizer = get_tokenizer(
        parsed.tokenizer or parsed.model,
        tokenizer_mode=parsed.tokenizer_mode,
        trust_remote_code=parsed.trust_remote_code,
    )
    try:
        get_samples(parsed, tokenizer)
    except Exception as error:  # vLLM's readers raise all kinds
        path = parsed.dataset_path
        raise ValueError(f"vLLM cannot read {parsed.dataset_name} from {path}: {error}") from error


def measure(server: Server, cell: Cell, seed: int, file: Path) -> dict[str, Any]:
    """Measure a cell, with prompts that depend on the seed.

    Returns vLLM's result, and what the server counted: `step_seconds`, the mean time of a token
    after the first, `preemptions` and `cache_tokens`. vLLM writes its result to `file`, and what it
    prints to a log beside it.

    Raises:
        ValueError: the server refused a request.
        EngineDied: the server died.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    flags = [*cell.flags, "--max-concurrency", str(cell.concurrency)]
    flags += [] if "--seed" in flag_names(flags) else ["--seed", str(seed)]
    flags += ["--backend", "openai", "--base-url", server.url, "--disable-tqdm"]
    flags += ["--save-result", "--save-detailed"]
    flags += ["--result-dir", str(file.parent), "--result-filename", file.name]
    if not proxy_bypass(HOST):  # vLLM's client asks a proxy that a variable names
        others = os.environ.get("no_proxy", os.environ.get("NO_PROXY"))
        os.environ["no_proxy"] = f"{others},{HOST}" if others else HOST
    before = read_metrics(server)
    with (file.parent / "client.log").open("a") as log, _printing_to(log):
        from vllm.benchmarks.serve import main_async

        try:
            result: dict[str, Any] = asyncio.run(main_async(parse_client_flags(flags)))
        except Exception:
            server.ask("/v1/models")  # raises if it is dead
            raise
    if result["failed"]:
        server.ask("/v1/models")
        reason = next(filter(None, result["errors"]), "no reason given")
        raise ValueError(f"{result['failed']} requests of {cell} failed, the first: {reason}")
    after = read_metrics(server)
    seconds, count, preempted = (after[name] - before[name] for name in METRICS)
    counted = {"preemptions": preempted, "cache_tokens": server.facts["cache_tokens"]}
    return result | counted | ({"step_seconds": seconds / count} if count else {})


def parse_client_flags(flags: Sequence[str]) -> argparse.Namespace:
    """Parse flags as `vllm bench serve` does, which ends the process if one is wrong."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    return parser.parse_args([*flags])


@contextmanager
def _printing_to(log: TextIO) -> Iterator[None]:
    """Let standard output go to a file, also that of vLLM's loggers, which keep its descriptor."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(log.fileno(), 1)
    try:
        with redirect_stdout(log):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@dataclass
class Comparison:
    """Measures cells on every side of a record, and writes the results to a folder."""

    record: Record
    cells: Sequence[Cell]
    target: str
    flags: list[str]
    """Flags of every `vllm serve`."""
    out: Path
    progress: Progress
    at_once: int = 1
    """Servers that may start at the same time."""
    warmup_rounds: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of every server, besides those of its side."""
    check: Callable[[Side, dict[str, Any]], None] = lambda side, result: None
    """Raises ValueError if a result says nothing."""

    def run(self) -> None:
        """Start the servers, measure all rounds, and write the results after each."""
        sides, rounds, record = self.record.sides, self.record.rounds, self.record
        record.about["flags"] = shlex.join(self.flags)
        self.progress.say(
            f"starting {len(sides)} servers ({', '.join(side.name for side in sides)}), then"
            f" {self.warmup_rounds} warm-up and {rounds} measured rounds of"
            f" {len(self.cells) * len(sides)} measurements. Ctrl-C stops; complete rounds are kept"
            f" in {self.out}."
        )
        with self._servers() as servers:
            for server in servers.values():
                record.about["versions"] |= server.facts["versions"]
            for number in range(-self.warmup_rounds, rounds):
                first = number % len(sides)  # so that no side always comes first in a measurement
                in_turns = [*sides[first:], *sides[:first]]
                found = self._measure_round(number, in_turns, servers)
                if number < 0:
                    continue
                record.finish_round(found)
                record.write(self.out)
                if number + 1 < rounds:  # the report follows the last round
                    for load in record.results.loads:
                        self.progress.say(record.make_tables(record.results, load)[0].plain())

    @contextmanager
    def _servers(self) -> Iterator[dict[str, Server]]:
        """Start a server for each side, by name; all end with the context.

        Sides of ours start first, each alone, because they time their costs at the end of their
        start and must not be disturbed.
        """
        waiting = sorted(self.record.sides, key=lambda side: side.plugins != PLUGIN)
        servers: dict[str, Server] = {}
        with ExitStack() as stack:
            try:
                with self.progress.stage("starting the servers", len(waiting), "servers") as tell:
                    while waiting:
                        alone = not servers or waiting[0].plugins == PLUGIN
                        room = 1 if alone else self.at_once
                        crowd, waiting = waiting[:room], waiting[room:]
                        names, began = ", ".join(side.name for side in crowd), time.monotonic()
                        tell(len(servers), f"waiting for {names}")
                        for side in crowd:
                            one = side.start(
                                self.out / "logs", self.target, self.flags, self.environment
                            )
                            servers[side.name] = stack.enter_context(one)
                        for number, side in enumerate(crowd, len(servers) - len(crowd) + 1):
                            servers[side.name].wait()
                            tell(number, f"{side.name} is up")
                        took = time.monotonic() - began
                        self.progress.say(f"up after {took:.0f} s: {names}")
                yield servers
            finally:
                for server in servers.values():
                    server.dismiss()  # all, before waiting for the first

    def _measure_round(
        self, number: int, sides: Sequence[Side], servers: Mapping[str, Server]
    ) -> list[dict[str, Any]]:
        """Measure every cell on each side in turn; negative numbers are those of warm-up rounds."""
        name = "warm-up" if number < 0 else f"round {number + 1} of {self.record.rounds}"
        found: list[dict[str, Any]] = []
        with self.progress.stage(name, len(self.cells) * len(sides), "measurements") as tell:
            for cell in self.cells:
                for side in sides:
                    tell(len(found), f"{cell}: {side.name}")
                    words = re.findall(r"[\w.]+", f"{name} {cell} {side.name}")
                    file = self.out / "raw" / f"{'-'.join(words)}.json"
                    seed = number + self.warmup_rounds  # the same for all sides
                    result = measure(servers[side.name], cell, seed, file)
                    self.check(side, result)
                    # What is said of single requests is only in vLLM's own file.
                    kept = {
                        key: value
                        for key, value in result.items()
                        if not isinstance(value, list) or key.startswith("spec_decode")
                    }
                    about = {"round": number, "load": cell.load, "setting": cell.concurrency}
                    found.append({**about, "side": side.name, "result": kept})
            tell(len(found))
        return found
