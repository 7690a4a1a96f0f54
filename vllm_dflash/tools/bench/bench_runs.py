"""Measures servers in turns, with the client of `vllm bench serve` in this process."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from vllm_dflash.tools.bench.bench_result import Record
from vllm_dflash.tools.bench.sides import Side, SideServers
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.server import Server


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


Measure = Callable[[Server, Cell, int, Path], dict[str, Any]]


def read_early(cell: Cell) -> None:
    """Let vLLM read the prompts of a cell before servers start.

    Raises:
        ValueError: it cannot.
    """
    if missing := [name for name in ("pandas", "matplotlib") if find_spec(name) is None]:
        raise ValueError(f'{", ".join(missing)} missing: pip install "vllm-dflash[bench]"')
    from vllm.benchmarks.datasets import get_samples
    from vllm.tokenizers import get_tokenizer

    parsed = _parse(cell.flags)
    try:
        get_samples(parsed, get_tokenizer(parsed.model))
    except (ValueError, KeyError, NotImplementedError, ImportError, AssertionError) as error:
        path = parsed.dataset_path
        raise ValueError(f"vLLM cannot read {parsed.dataset_name} from {path}: {error}") from error


def measure(server: Server, cell: Cell, seed: int, file: Path) -> dict[str, Any]:
    """Measure a cell, with prompts that depend on the seed. Returns vLLM's result.

    vLLM writes it to `file`, and what it prints to a log beside it.

    Raises:
        ValueError: the server refused a request.
        EngineDied: the server died.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    flags = [*cell.flags, "--max-concurrency", str(cell.concurrency)]
    flags += [] if "--seed" in flags else ["--seed", str(seed)]
    flags += ["--backend", "openai", "--base-url", server.url, "--disable-tqdm"]
    flags += ["--save-result", "--save-detailed"]
    flags += ["--result-dir", str(file.parent), "--result-filename", file.name]
    with (file.parent / "client.log").open("a") as log, _printing_to(log):
        from vllm.benchmarks.serve import main_async

        try:
            result: dict[str, Any] = asyncio.run(main_async(_parse(flags)))
        except Exception:
            server.ask("/v1/models")  # raises if it is dead
            raise
    if result["failed"]:
        server.ask("/v1/models")
        reason = next(filter(None, result["errors"]), "no reason given")
        raise ValueError(f"{result['failed']} requests of {cell} failed, the first: {reason}")
    return result


def _parse(flags: Sequence[str]) -> argparse.Namespace:
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


def without_details(side: Side, result: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a result says of single requests; vLLM's own file has it."""
    return {
        name: value
        for name, value in result.items()
        if not isinstance(value, list) or name.startswith("spec_decode")
    }


@dataclass
class Comparison:
    """Measures cells on every side of a record, and writes the results to a folder."""

    record: Record
    cells: Sequence[Cell]
    servers: SideServers
    out: Path
    progress: Progress
    warmup_rounds: int = 1
    measure: Measure = measure
    shorten: Callable[[Side, dict[str, Any]], dict[str, Any]] = without_details
    """What of a result is kept in `result.json`."""

    def run(self) -> None:
        """Start the servers, measure all rounds, and write the results after each."""
        self.progress.say(self.announcement())
        sides, rounds = self.record.sides, self.record.rounds
        with self.servers:
            for one in self.servers.start(sides, self.progress):
                self.record.about["versions"] |= one["versions"]
            for number in range(-self.warmup_rounds, rounds):
                first = number % len(sides)  # so that no side always comes first in a measurement
                in_turns = [*sides[first:], *sides[:first]]
                found = self._measure_round(number, in_turns)
                if number < 0:
                    continue
                self.record.finish_round(found)
                self._write()
                if number + 1 < rounds:  # the report follows the last round
                    results = self.record.results
                    for load in results.loads:
                        self.progress.say(self.record.table_makers[0](results, load).plain())

    def _write(self) -> None:
        self.record.write(self.out)
        if self.record.plots:
            from vllm_dflash.tools.bench.plot import plot_panels

            results = self.record.results
            plot_panels([(results, load) for load in results.loads], self.out / "result.png")

    def announcement(self) -> str:
        """Say what will run."""
        names = [side.name for side in self.record.sides]
        return (
            f"starting {len(names)} servers ({', '.join(names)}), then {self.warmup_rounds} warm-up"
            f" and {self.record.rounds} measured rounds of {len(self.cells) * len(names)}"
            f" measurements. Ctrl-C stops; complete rounds are kept in {self.out}."
        )

    def _measure_round(self, number: int, sides: Sequence[Side]) -> list[dict[str, Any]]:
        """Measure every cell on each side in turn; negative numbers are those of warm-up rounds."""
        name = "warm-up" if number < 0 else f"round {number + 1} of {self.record.rounds}"
        found: list[dict[str, Any]] = []
        with self.progress.stage(name, len(self.cells) * len(sides), "measurements") as tell:
            for cell in self.cells:
                for side in sides:
                    tell(len(found), f"{cell}: {side.name}")
                    file = self.out / "raw" / f"{_slug(name, cell, side.name)}.json"
                    seed = number + self.warmup_rounds  # the same for all sides
                    result = self.measure(self.servers[side.name], cell, seed, file)
                    about = {"round": number, "load": cell.load, "setting": cell.concurrency}
                    found.append({**about, "side": side.name, "result": self.shorten(side, result)})
            tell(len(found))
        return found


def _slug(*names: object) -> str:
    """Return a file's name made of these names."""
    return "-".join(re.findall(r"\w+", " ".join(map(str, names))))
