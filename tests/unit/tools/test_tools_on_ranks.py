"""Tensor parallelism in the commands: which of them take it, and what they ask of an engine."""

from pathlib import Path

import pytest

from parity.check import check_parity
from support import DEMO
from support.engines import DRAFTER, TARGET
from support.pairs import make_pair
from vllm_dflash.tools import cli
from vllm_dflash.tools.bench.comparison import Comparison

BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def test_parity_takes_one_rank(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 2.*leave it out.*verify .*-- -"):
        check_parity(str(pair.drafter), str(pair.target), tensor_parallel_size=2)


def test_bench_gives_every_engine_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Comparison] = []
    monkeypatch.setattr(Comparison, "run", lambda self: asked.append(self) or [])
    arguments = ["bench", "--target", str(TARGET), "--drafter", str(DRAFTER)]
    arguments += ["--prompts", str(DEMO / "held_out.jsonl"), "--tensor-parallel-size", "2"]
    arguments += ["--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert asked[0].engines.arguments["tensor_parallel_size"] == 2
