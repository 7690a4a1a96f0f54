"""Measures a server with the client of `vllm bench serve`, in this process."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

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
