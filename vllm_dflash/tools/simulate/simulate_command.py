"""From the arguments of `bench --simulate-costs` to tables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import AutoTokenizer

from vllm_dflash.tools.parity.oracle import Oracle
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.prompts import read_prompts
from vllm_dflash.tools.simulate.cost_table import CostTable
from vllm_dflash.tools.simulate.recorded_texts import RecordedText, record
from vllm_dflash.tools.simulate.simulated_decoding import Decoded, decode
from vllm_dflash.tools.tables import Table

NUM_TEXTS, STEPS = 32, 400
HEADS = (
    "requests",
    "chains / plain",
    "trees / plain",
    "trees / chains",
    "verified by chains",
    "by trees",
    "accepted by chains",
    "by trees",
)


def simulate(parsed: argparse.Namespace, progress: Progress) -> tuple[list[Table], list[str]]:
    """A table for each file of costs, and what to know of them.

    Raises:
        ValueError: a file of costs is none, or something of the pair does not fit.
        OSError: a file is missing.
    """
    tables = [CostTable.read(file) for file in parsed.simulate_costs]
    demo = parsed.demo
    target, drafter = parsed.target or str(demo / "target"), parsed.drafter or str(demo / "drafter")
    prompts = read_prompts(parsed.prompts or demo / "held_out.jsonl")[:NUM_TEXTS]
    oracle = Oracle.load(target, drafter, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    name = "recording drafts along the target's texts"
    with progress.stage(name, len(encoded), "texts") as tell:
        texts = record(oracle, encoded, parsed.tokens, tell)
    notes = [
        f"{len(texts)} texts of {parsed.tokens} greedy tokens of {target}, with what {drafter}"
        " drafts at each of their tokens, decoded by the planner in a simulation: a step takes"
        " what the table of costs says. Nothing here was timed.",
        *(f"Costs of {table.name}: {table.source}." for table in tables),
    ]
    return [compare(texts, table, parsed.concurrency) for table in tables], notes


def compare(texts: Sequence[RecordedText], table: CostTable, concurrency: Sequence[int]) -> Table:
    """Chains beside trees, at each number of requests."""
    rows = []
    for count in concurrency:
        chains, trees = (decode(texts, table, count, STEPS, **kind) for kind in ({"nodes": 0}, {}))
        rows.append([str(count), *_cells(chains, trees)])
    return Table(f"Simulated: {table.name}", HEADS, rows)


def _cells(chains: Decoded, trees: Decoded) -> list[str]:
    rates = [
        chains.tokens_per_second / chains.plain,
        trees.tokens_per_second / chains.plain,
        trees.tokens_per_second / chains.tokens_per_second,
    ]
    counts = [chains.verified, trees.verified, chains.accepted, trees.accepted]
    return [f"{value:.2f}" for value in (*rates, *counts)]
