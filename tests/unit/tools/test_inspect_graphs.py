"""`vllm-dflash inspect` on a faked CUDA: which graphs are captured, and what goes with them.

vLLM and our speculator say so, from configs; the figures here are worked out by hand.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import vllm
from packaging.version import Version
from transformers import Qwen3NextConfig

from support import DEMO, ROOT
from support.engines import USES_V2
from support.faked_cuda import lines_on_cuda
from support.pairs import make_pair
from support.targets import SHAPE
from vllm_dflash.tools.inspect.inspect_report import MEASURED

pytestmark = pytest.mark.usefixtures("runner")  # on V2's tests for vLLM 0.33's sake, too

Found = dict[str, Any]
OPTIONS = {"dtype": "bfloat16", "max_num_seqs": 16, "max_num_batched_tokens": 512}

# 16 requests of 8 rows twice over: graphs up to 256 tokens. vLLM's steps are 1, 2, 4 and multiples
# of 8, and 12 is three requests that are drafted 3 tokens each.
TOKENS = [1, 2, 4, 8, 12, *range(16, 257, 8)]
IN_PIECES = {"model": "target", "kind": "pieces", "rows": None, "sizes": TOKENS}
BLOCKS = {"model": "drafter", "kind": "uniform", "rows": 8, "sizes": [*range(1, 17)]}

IS_STAGED = Version(vllm.__version__) >= Version("0.33")
STAGED = 16 * 8 * 2 * 64 * 2 if IS_STAGED else 0
"""Rows of 16 blocks, 2 taps of 64 numbers, 2 bytes each."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """By name of the case."""
    if USES_V2 and not IS_STAGED:
        pytest.skip("the same as on V1")
    folder = tmp_path_factory.mktemp("graphs")
    pair = make_pair(folder)
    linear = ["linear_attention"] * 3 + ["full_attention"]
    hybrid = Qwen3NextConfig(**SHAPE, layer_types=linear, dtype="bfloat16")
    hybrid.architectures = ["Qwen3NextForCausalLM"]
    hybrid.save_pretrained(folder / "hybrid")
    own = {"drafter": str(pair.drafter), "target": str(pair.target), "options": OPTIONS}
    demo = {"drafter": str(DEMO / "drafter"), "target": str(DEMO / "target"), "options": {}}
    cases = {
        "8.0": {**own, "capability": "8.0"},
        "9.0": {**own, "capability": "9.0"},
        "hybrid": {**own, "capability": "9.0", "target": str(folder / "hybrid")},
        "demo": {**demo, "capability": "9.0"},
    }
    lines = lines_on_cuda("support.inspect_child", json.dumps([*cases.values()]))
    return dict(zip(cases, lines, strict=True))


def test_few_lengths_have_graphs_where_drafts_are_not_trimmed(found: dict[str, Found]) -> None:
    """A size is rounded up to whole requests, and dropped where those are more than 16."""
    graphs = found["8.0"]["graphs"]
    uniform = {
        8: [*range(1, 17)],
        4: [1, 2, 3, 4, 6, 8, 10, 12, 14, 16],
        2: [1, 2, 4, 6, 8, 12, 16],
        1: [1, 2, 4, 8, 12, 16],
    }
    assert graphs["captured"] == [
        *(
            {"model": "target", "kind": "uniform", "rows": rows, "sizes": sizes}
            for rows, sizes in uniform.items()
        ),
        IN_PIECES,
        BLOCKS,
    ]
    assert graphs["untrimmed"] == "FlashAttentionBackend has no CUDA graphs for ragged batches"
    assert graphs["least_reserved"] == (39 - 1) << 20  # a MiB for each but the first


def test_ragged_graphs_where_drafts_are_trimmed(found: dict[str, Found]) -> None:
    graphs = found["9.0"]["graphs"]
    ragged = [size for size in TOKENS if size <= 16 * 8]
    assert graphs["captured"] == [
        {"model": "target", "kind": "ragged", "rows": 8, "sizes": ragged},
        IN_PIECES,
        BLOCKS,
    ]
    assert (graphs["untrimmed"], graphs["mode"]) == (None, "FULL_AND_PIECEWISE")
    assert graphs["least_reserved"] == (20 - 1) << 20


@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_memory_beside_graphs(found: dict[str, Found], capability: str) -> None:
    graphs = found[capability]["graphs"]
    # Of a token: number, position, whether it is padding; position of context; a row of 64.
    of_tokens = 512 * (4 + 8 + 1 + 8 + 2 * 64)
    # Of a request: where it starts, two lengths, its slot, temperature, seed. Starts have an end.
    of_requests = 16 * (4 + 4 + 4 + 8 + 4 + 8) + 4
    # Of a draft: token, probability, three indices, a column; and its confidence.
    of_drafts = 16 * 7 * (8 + 4 + 3 * 8 + 4 + 4)
    # Of a request's slot: whose its drafts are, match and length of its text's; three numbers and a
    # token for each draft; biases of blocks and texts, of everybody as well. Tables of rates, trust
    # and knots. What is reported of it, and what is looked up in its text, which may be of 512.
    of_slots = 16 * (3 * 4 + 7 * (3 * 4 + 8)) + 2 * 17 * 2 * 4 + (2 * 7 * 11 + 512 + 11) * 4
    of_texts = 16 * ((6 + 7) * 4 + 7 * 8 + 2 * 4 + 8 + 512 * 4)
    expected = of_tokens + of_requests + of_drafts + of_slots + of_texts + STAGED
    assert graphs["staged_taps"] == STAGED
    assert graphs["drafter_buffers"] == expected
    assert graphs["target_outputs"] == 128 * (1 + 2) * 64 * 2  # hidden states and two taps
    assert (graphs["max_num_seqs"], graphs["max_num_batched_tokens"]) == (16, 512)


def test_the_section_of_the_report(found: dict[str, Found]) -> None:
    staged = ", 32.0 KiB of it taps for graphs" if IS_STAGED else ""
    buffers = "151 KiB" if IS_STAGED else "119 KiB"
    assert found["8.0"]["screens"][-1].splitlines() == [
        "CUDA graphs (mode FULL_AND_PIECEWISE; up to 16 requests and 512 tokens a step)",
        "  drafts trimmed on the device  no: FlashAttentionBackend has no CUDA graphs for ragged"
        " batches",
        "  target, drafts of 7           16: 1 to 16 requests",
        "  target, drafts of 3           10: 1 to 4, 6 to 16 by 2 requests",
        "  target, drafts of 1           7: 1, 2 to 8 by 2, 12, 16 requests",
        "  target, drafts of 0           6: 1, 2, 4 to 16 by 4 requests",
        "  target, any batch, in pieces  36: 1, 2, 4 to 16 by 4, 24 to 256 by 8 tokens",
        "  drafter, blocks of 8          16: 1 to 16 requests",
        f"  drafter's buffers             {buffers}{staged}",
        "  target's outputs              48.0 KiB",
        "  graphs themselves             38.0 MiB set aside, or more; vLLM measures them, and"
        f' logs "{MEASURED}"',
    ]


@pytest.mark.skipif(IS_STAGED, reason="the page shows vLLM 0.32")
def test_the_page_shows_the_demo_pair(found: dict[str, Found]) -> None:
    assert f"\n{found['demo']['screens'][-1]}\n" in (ROOT / "docs" / "inspect.md").read_text()


def test_a_target_whose_layers_cannot_be_told(found: dict[str, Found]) -> None:
    hybrid = found["hybrid"]
    assert (hybrid["exit_code"], hybrid["graphs"]) == (0, None)
    assert "CUDA graphs: the target has layers that are no attention" in hybrid["not_checked"]


def test_the_line_of_vllms_log() -> None:
    spec = find_spec("vllm.v1.worker.gpu.model_runner")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert MEASURED.replace("...", "%.0f", 1).replace("...", "%.2f", 1) in source
