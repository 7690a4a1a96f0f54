"""Data parallelism of a dense target: an engine on each rank, which plans for itself."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from support.engines import DRAFTER, TARGET, held_out_prompts
from support.servers import Server, serving
from support.waiting import wait_until

PROMPT = held_out_prompts(87)[-1]
"""Each of the first 48 tokens after it is best by 0.3 nat: also in bfloat16, in any batch."""
SETTINGS = ("--data-parallel-size=2", "--max-num-seqs=8", "--enforce-eager")
WHOLE = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def by_engine(server: Server, name: str) -> dict[str, float]:
    """Return a counter of each engine."""
    found = re.findall(
        rf'^{name}{{engine="(\d)",[^}}]*}} ([0-9.e+-]+)$',
        httpx.get(f"{server.url}/metrics").text,
        re.MULTILINE,
    )
    return {engine: float(value) for engine, value in found}


@pytest.mark.slow  # two engines start
def test_each_rank_plans_for_itself(tmp_path: Path) -> None:
    drafts = (
        f"--speculative-config.{key}={value}"
        for key, value in (("method", "dflash"), ("model", DRAFTER))
    )
    with serving(tmp_path / "log", TARGET, *SETTINGS, *drafts, environment=WHOLE) as server:
        answers: set[str] = set()

        def both_have_accepted() -> bool:
            with ThreadPoolExecutor(4) as threads:
                answers.update(threads.map(server.complete, [PROMPT] * 4))
            accepted = by_engine(server, "vllm:spec_decode_num_accepted_tokens_total")
            return len(accepted) == 2 and min(accepted.values()) > 0

        wait_until(both_have_accepted, "accepted drafts of both engines")
        planned = by_engine(server, "vllm:dflash_planned_tokens_total")
        said = (tmp_path / "log").read_text()
    assert len(answers) == 1
    assert planned.keys() == {"0", "1"}
    assert min(planned.values()) > 0
    assert said.count("vllm-dflash") >= 2
    assert len(re.findall(r"vllm-dflash [\d.]+ is active", said)) == 2
