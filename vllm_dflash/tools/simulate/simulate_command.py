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
from vllm_dflash.tools.simulate.simulated_decoding import decode
from vllm_dflash.tools.tables import Table

NUM_TEXTS, STEPS = 32, 400
RATES = ("requests", "chains / plain", "trees / plain", "trees / chains")
HEADS = (*RATES, "verified by chains", "by trees", "accepted by chains", "by trees")


def simulate(parsed: argparse.Namespace, progress: Progress) -> tuple[list[Table], list[str]]:
    """A table for each file of costs, and what to know of them.

    Raises:
        ValueError: a file of costs is none, or something of the pair does not fit.
        OSError: a file is missing.
    """
    tables = [CostTable.read(file) for file in parsed.simulate_costs]
    demo = parsed.demo
    target, drafter = parsed.target or str(demo / "target"), parsed.drafter or str(demo / "drafter")
    prompts = read_prompts(parsed.prompts or demo / "held_out.jsonl", NUM_TEXTS)
    oracle = Oracle.load(target, drafter, torch.float32)
    encoded = AutoTokenizer.from_pretrained(target)(prompts)["input_ids"]
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
    for requests in concurrency:
        chains = decode(texts, table, requests, STEPS, nodes=0)
        trees = decode(texts, table, requests, STEPS)
        of_chains, of_trees = chains.tokens_per_second, trees.tokens_per_second
        rates = [of_chains / chains.plain, of_trees / chains.plain, of_trees / of_chains]
        counts = [chains.verified, trees.verified, chains.accepted, trees.accepted]
        rows.append([str(requests), *(f"{value:.2f}" for value in (*rates, *counts))])
    return Table(f"Simulated: {table.name}", HEADS, rows)
